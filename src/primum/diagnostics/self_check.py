"""`reducer.check`: the gradients that are applied, and the step that is predicted, on one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import primum
from primum.kernel.head import Head
from primum.kernel.recipe import Recipe
from primum.setup.find import find_head, given_head
from primum.setup.validate import optimizers_of

LARGEST = (
    1e-3  # Relative error above which a check fails; float32 leaves 1e-6, half precision more.
)


@dataclass(frozen=True)
class SelfCheck:
    """What a check found. `print` it for three lines.

    Attributes:
        head: The dotted name of the head.
        gradient_error: Distance of the applied gradients from those of `mean((1 + w) * losses)`,
            relative to the latter's length.
        prediction_error: Distance of the head's predicted step from a real one, relative to it.
        ok: Whether both are below `LARGEST`.
        applied: Why weights were not applied, or "".
    """

    head: str
    gradient_error: float
    prediction_error: float
    ok: bool
    applied: str = ""

    def __str__(self) -> str:
        verdict = {True: "ok", False: "WRONG"}
        plain = f", plain: {self.applied}" if self.applied else ""
        return "\n".join(
            (
                f"head: {self.head}{plain}",
                "gradients of mean((1 + w) * losses): relative error "
                f"{self.gradient_error:.1e}, {verdict[self.gradient_error < LARGEST]}",
                f"prediction of the head's step: relative error {self.prediction_error:.1e}, "
                f"{verdict[self.prediction_error < LARGEST]}",
            )
        )


def self_check(
    model: nn.Module,
    head: str,
    optimizers: list[torch.optim.Optimizer],
    recipe: Recipe,
    per: str,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> SelfCheck:
    """Compare on copies; model, optimizers and random numbers stay as they are."""
    devices = [each for each in {p.device for p in model.parameters()} if each.type == "cuda"]
    with torch.random.fork_rng(devices=devices):
        copies = copy.deepcopy((model, optimizers))
        applied, weights, why = _applied(*copies, head, recipe, per, loss_fn, batch)
    with torch.random.fork_rng(devices=devices):
        copies = copy.deepcopy((model, optimizers))
        wanted = _wanted(*copies, weights, loss_fn, batch)
        prediction_error = _prediction_error(*copies, head)
    error = _relative(applied, wanted)
    ok = error < LARGEST and prediction_error < LARGEST
    return SelfCheck(head, error, prediction_error, ok, why)


def _applied(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    head: str,
    recipe: Recipe,
    per: str,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> tuple[list[Tensor], Tensor, str]:
    """The gradients that the hook leaves, its weights, and why there are none."""
    model.zero_grad(set_to_none=True)
    with primum.attach(model, optimizers, head=head, recipe=copy.deepcopy(recipe), per=per) as own:
        losses = loss_fn(model, batch)
        if losses.dim() == 0:
            raise ValueError('loss_fn must return one loss per sample: use reduction="none"')
        torch.autograd.backward(losses.mean())
        report = own.last
    if report is None:
        return _grads(model), torch.zeros((), device=losses.device), "no gradient reached the head"
    weights = report.extra_weights if report.applied else torch.zeros_like(report.extra_weights)
    return _grads(model), weights, report.reason


def _wanted(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    weights: Tensor,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> list[Tensor]:
    """The gradients of the weighted loss, from a pass of its own."""
    model.zero_grad(set_to_none=True)
    losses = loss_fn(model, batch).flatten()
    rows = max(weights.numel(), 1)
    if losses.numel() % rows:
        raise ValueError(f"loss_fn returned {losses.numel()} losses for {rows} rows of the head")
    weighted = (1 + weights).view(-1, 1).to(losses.dtype) * losses.view(rows, -1)
    torch.autograd.backward(weighted.mean())
    return _grads(model)


def _prediction_error(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    head: str,
) -> float:
    """How far the head's predicted step is from a real one, for the gradients that are there."""
    layer = given_head(model, head) if head != "head" else find_head(model)
    seen = Head(layer, optimizers_of(optimizers, layer, head), head)
    parts = seen.parts()
    grads = [getattr(layer, part).grad for part in seen.trained]
    if any(grad is None for grad in grads):
        return 0.0
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    total = seen.side_by_side([grad.to(wide) for grad in grads])
    update = seen.predict(parts, total)
    before = [getattr(layer, part).detach().clone() for part in seen.trained]
    for each in {id(each): each for each in seen.optimizers.values()}.values():
        each.step()
    moved = [
        getattr(layer, part).detach() - old for part, old in zip(seen.trained, before, strict=True)
    ]
    real = seen.side_by_side([each.to(total) for each in moved])
    return _relative([update.step * update.lr], [real])


def _grads(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def _relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    if len(found) != len(wanted):
        return float("inf")
    apart = sum(float((x - y).double().square().sum()) for x, y in zip(found, wanted, strict=True))
    length = sum(float(each.double().square().sum()) for each in wanted)
    return (apart / length) ** 0.5 if length > 0 else float(apart > 0)
