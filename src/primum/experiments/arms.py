"""The arms of the comparison: each is one way to take a step, and nothing else differs.

base        the plain loop, watched by `primum.observe`, which leaves every gradient as it is
primum      the plain loop after `primum.attach`
permuted    control: primum's extra weights, dealt out at random within the batch; if only the
            amount of extra weight mattered, and not who gets it, this would do as well
lr-matched  control: base with its learning rate raised by the mean weight that primum gave in the
            run with the same seed; if primum were only a larger step, this would do as well
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from primum import StepReport

# Images [B, 1, 8, 8], labels [B] -> the plain mean loss and, if watched, what the step did.
Step = Callable[[Tensor, Tensor], "tuple[Tensor, StepReport | None]"]
# Makes a step from a model, its optimizer, the trust-region radius and a seed.
MakeStep = Callable[[nn.Module, torch.optim.Optimizer, float, int], Step]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, radius: float, seed: int) -> Step:
    """The step everybody writes. Only the timing runs it: it says nothing about harm."""

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return _plain_step(model, optimizer, images, labels), None

    return step


def observed(model: nn.Module, optimizer: torch.optim.Optimizer, radius: float, seed: int) -> Step:
    """The plain step, with the harm it does measured on the way."""
    watcher = primum.observe(model, optimizer, radius=radius)

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, StepReport | None]:
        return _plain_step(model, optimizer, images, labels), watcher.last

    return step


def reduced(model: nn.Module, optimizer: torch.optim.Optimizer, radius: float, seed: int) -> Step:
    """The plain step after the one added line."""
    reducer = primum.attach(model, optimizer, radius=radius)

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, StepReport | None]:
        return _plain_step(model, optimizer, images, labels), reducer.last

    return step


def permuted(model: nn.Module, optimizer: torch.optim.Optimizer, radius: float, seed: int) -> Step:
    """A step with primum's extra weights in random order."""
    watcher = primum.observe(model, optimizer, radius=radius)
    generator = torch.Generator().manual_seed(seed)

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, StepReport | None]:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(images), labels, reduction="none")
        plain_loss = watcher(losses)
        report = watcher.last
        assert report is not None
        dealt = deal(report.extra_weights, generator)[report.own]
        ((1 + dealt) * losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return plain_loss.detach(), report

    return step


def deal(extra_weights: Tensor, generator: torch.Generator) -> Tensor:
    """The same extra weights in random order. Shapes: [B] -> [B]."""
    return extra_weights[torch.randperm(len(extra_weights), generator=generator)]


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


ARMS: dict[str, MakeStep] = {
    "base": observed,
    "primum": reduced,
    "permuted": permuted,
    "lr-matched": observed,
}
# What an arm costs: base and lr-matched without being watched.
TIMED: dict[str, MakeStep] = {**ARMS, "base": plain, "lr-matched": plain}
