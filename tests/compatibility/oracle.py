"""The slow way, for any model, loss and set of optimizers: what every step of a loop is held to.

Explicit per-sample gradients of the head, a copy that really steps, and a copy that is trained on
the weighted loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from loops import report_of
from primum import Problem, Reducer, StepReport, solve
from primum.kernel.recipe import RADIUS

LossesOf = Callable[[nn.Module], Tensor]  # each sample's share of the loss; their sum is the loss


@dataclass(frozen=True)
class Explicit:
    """Shapes: gradients [B, parameters of the head], step [parameters], per unit `lr`."""

    gradients: Tensor
    step: Tensor

    @property
    def drift(self) -> Tensor:
        return self.gradients @ self.step

    @property
    def harm(self) -> Tensor:
        return self.drift.clamp_min(0).sum()

    @property
    def problem(self) -> Problem:
        """Where the gain is 1 (SGD), with the default radius."""
        gram = self.gradients @ self.gradients.t()
        return Problem.dense(gram, self.drift, RADIUS["sample"] * self.step.norm())


def assert_solved(report: StepReport, problem: Problem) -> None:
    """The report's weights solve the problem: the solver's own answer, where it has arrived."""
    expected = solve(problem)
    if report.gap < 1e-9:
        torch.testing.assert_close(
            report.extra_weights, expected.extra_weights, rtol=1e-5, atol=1e-7
        )
    harm = problem.drift.clamp_min(0).sum()
    assert (report.objective - expected.objective).abs() <= 0.02 * harm + 1e-12


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


def twins(
    model: nn.Module, optimizers: Sequence[optim.Optimizer]
) -> tuple[nn.Module, list[optim.Optimizer]]:
    """Copies that belong together, with what has accumulated in `.grad`."""
    copied: tuple[nn.Module, list[optim.Optimizer]] = copy.deepcopy((model, list(optimizers)))
    for one, other in zip(copied[0].parameters(), model.parameters(), strict=True):
        one.grad = None if other.grad is None else other.grad.clone()
    return copied


def explicit(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    head: str,
    losses_of: LossesOf,
    *,
    lr: float,
    weights: Tensor | None = None,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> Explicit:
    """What the head's samples want, and the step it really takes; `between` backward and step.

    The arguments stay as they are. With `weights`, the step is that of the weighted losses.
    """
    twin, steppers = twins(model, optimizers)
    trained = [p for p in twin.get_submodule(head).parameters() if p.requires_grad]
    losses = losses_of(twin)
    rows = [
        flat(torch.autograd.grad(each, trained, retain_graph=True, materialize_grads=True))
        for each in losses.flatten()
    ]
    before = flat(trained)
    (losses if weights is None else weights * losses).sum().backward()
    between(twin)
    for stepper in steppers:
        stepper.step()
    return Explicit(torch.stack(rows), (flat(trained) - before) / lr)


def check_step(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    reducer: Reducer,
    losses_of: LossesOf,
    *,
    head: str,
    lr: float,
    gain_one: bool = False,
    by_call: bool = False,
) -> float:
    """One step of the user's loop, in float64. Returns the largest extra weight.

    The drift is that of a step really taken; with `gain_one`, the weights are those of the explicit
    problem; the gradients are those of the weighted loss. `by_call` is the explicit form.
    """
    expected = explicit(model, optimizers, head, losses_of, lr=lr)
    twin, _ = twins(model, optimizers)
    shares = losses_of(model)
    (reducer(len(shares) * shares) if by_call else shares.sum()).backward()
    report = report_of(reducer)
    assert report.applied, report.reason
    assert report.fallbacks == 0
    w = report.extra_weights
    # The oracle reads steps off parameters of order 1 that move by 1e-3: twelve digits.
    torch.testing.assert_close(report.drift, expected.drift, rtol=1e-6, atol=1e-9)
    if gain_one:
        assert_solved(report, expected.problem)
    losses = losses_of(twin)
    ((1 + w).view_as(losses) * losses).sum().backward()
    found, wanted = (
        flat([p.grad for p in net.parameters() if p.grad is not None]) for net in (model, twin)
    )
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(w.max())
