"""The predicted step is the step that is made, whatever a loop or optimizer does to `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

from .scene import Net, batch, net, report_of, rows_of_gradients

STEPS = 12
SETTLED = 4  # Steps after which a factor that hardly changes is known from the one before.


def errors(
    make: Callable[[nn.Module], optim.Optimizer], clip: Callable[[Net], Any] | None = None
) -> list[float]:
    """Of each step, how far the drift is from `G (moved / lr)`, relative to the latter.

    Only observed, on one batch and with a small lr: gradients hardly change from step to step.
    """
    model = net()
    optimizer = make(model)
    reducer = primum.observe(model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    params = list(model.head.parameters())
    found = []
    for _ in range(STEPS):
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        rows = rows_of_gradients(losses, params)
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        drift = report_of(reducer).drift
        if clip is not None:
            clip(model)
        optimizer.step()
        moves = [(p.detach() - old) / lr for p, old in zip(params, before, strict=True)]
        expected = rows @ torch.cat([each.flatten() for each in moves])
        found.append(float((drift - expected).norm() / expected.norm()))
    return found


def momentum(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-6)


class Writing(optim.Optimizer):
    """Keeps its step in `.grad`: what public optimizers do to save memory."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    def write(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.write(param, param.grad, self.state[param])
                    param.sub_(param.grad, alpha=group["lr"])


class Lars(Writing):
    """Weight decay, and the trust ratio of the layer."""

    def write(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        trust = 0.02 * param.norm() / (grad.norm() + 0.01 * param.norm())
        grad.add_(param, alpha=0.01).mul_(trust)


class Normalised(Writing):
    """As schedule-free AdamW: `.grad` is divided in place by the root of its second moment."""

    def write(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["square"], state["t"] = torch.zeros_like(param), 0
        state["t"] += 1
        state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        grad.div_((state["square"] / (1 - 0.99 ** state["t"])).sqrt().add_(1e-2))


class Filtered(Writing):
    """As GrokFast: `.grad` plus a moving average of it."""

    def write(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.98).add_(grad, alpha=0.02)
        grad.add_(average, alpha=2.0)


@pytest.mark.parametrize("make", [momentum, adamw])
def test_the_weight_is_clipped_and_the_bias_is_not(
    make: Callable[[nn.Module], optim.Optimizer],
) -> None:
    found = errors(make, lambda model: nn.utils.clip_grad_norm_([model.head.weight], 0.01))
    assert max(found[SETTLED:]) < 1e-2, found


def test_the_bias_is_clipped_and_the_weight_is_not() -> None:
    found = errors(momentum, lambda model: nn.utils.clip_grad_norm_([model.head.bias], 0.001))
    assert max(found[SETTLED:]) < 1e-2, found


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("limit", [None, 0.01])
def test_all_gradients_are_clipped_or_none(
    make: Callable[[nn.Module], optim.Optimizer], limit: float | None
) -> None:
    def clip(model: nn.Module) -> None:
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)

    found = errors(make, clip)
    assert max(found[SETTLED:]) < 1e-2, found


@pytest.mark.parametrize("kind", [Lars, Normalised, Filtered])
def test_an_optimizer_that_writes_into_the_gradient(kind: type[Writing]) -> None:
    """Its step is predicted by a dry run, which knows nothing of a factor and needs none."""
    found = errors(lambda model: kind(model.parameters()))
    assert max(found) < 1e-4, found
