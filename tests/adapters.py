"""Models whose head is frozen or no plain linear layer, for tests of what is measured instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRA(nn.Module):
    """A frozen layer with a trained correction of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corrected: Tensor = self.base(x) + 2 * self.lora_b(self.lora_a(x))
        return corrected


class Residual(nn.Module):
    """What an adapted block is: its adapter beside a path that bypasses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = LoRA(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x)).tanh()


class Cosine(nn.Linear):
    """A normalised head with a temperature that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class OwnCosine(nn.Module):
    """The same, no subclass of a linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Pointwise(nn.Conv1d):
    """A convolution of width 1 on features [B, d], as on one pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-1)).squeeze(-1)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def net(head: nn.Module, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, head)


def lora_below() -> nn.Sequential:
    """Two adapted blocks, a norm and a frozen head, as PEFT leaves a language model."""
    first = nn.Sequential(LoRA(nn.Linear(6, 8)), nn.Tanh())
    return nn.Sequential(first, Residual(8), Residual(8), frozen(nn.LayerNorm(8)), frozen_head())


def frozen_head() -> nn.Module:
    return frozen(nn.Linear(8, 4))


# What is made, the layer that is measured, and where the weights go in.
HEADS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "LoRA below a frozen head": (lora_below, "2.mix.lora_b", "4"),
    "frozen head right after the layer": (
        lambda: nn.Sequential(nn.Linear(6, 8), frozen_head()),
        "0",
        "1",
    ),
    "bias trained, weight frozen": (
        lambda: (model := net(nn.Linear(8, 4)), model[2].weight.requires_grad_(False))[0],
        "0",
        "2",
    ),
    "LoRA on the head": (lambda: net(LoRA(nn.Linear(8, 4))), "2.lora_b", "2"),
    "weight norm": (
        lambda: net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
        "0",
        "2",
    ),
    "spectral norm": (
        lambda: net(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))),
        "0",
        "2",
    ),
    "normalised, with a scale": (lambda: net(Cosine(8, 4)), "0", "2"),
    "the same, of its own class": (lambda: net(OwnCosine(8, 4)), "0", "2"),
    "a convolution": (lambda: net(Pointwise(8, 4)), "0", "2"),
    "a frozen convolution": (lambda: net(frozen(Pointwise(8, 4))), "0", "2"),
}
