"""What is trained and how: each recipe is one model with the optimizer and schedule that suit it.

Learning rates and weight decays were chosen for the base arm alone, by its test accuracy over other
seeds than the demo's (grids of factor 2 in lr; the best lr lies inside): no other arm is tuned.
The schedule is short on purpose: after 40 epochs every arm has fitted the training images, and what
made training faster need not show any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from primum.experiments.models import GroupNormCNN, PatchTransformer


@dataclass(frozen=True)
class Recipe:
    """A model, its optimizer and their settings; `warmup` is a share of all steps."""

    name: str
    title: str
    lr: float
    weight_decay: float
    warmup: float
    epochs: int = 15
    batch_size: int = 64
    train_size: int = 512
    noise: float = 0.5
    radius: float = 0.2

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches only; the few samples left over rotate with the order."""
        return self.train_size // self.batch_size

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch


CNN_SGD = Recipe("cnn-sgd", "Group-norm CNN, SGD with momentum", 0.1, 2e-3, 0.0)
TRANSFORMER_ADAMW = Recipe("transformer-adamw", "Transformer, AdamW", 1.6e-2, 0.1, 0.1)
RECIPES = {recipe.name: recipe for recipe in (CNN_SGD, TRANSFORMER_ADAMW)}


def build_model(recipe: Recipe, seed: int) -> nn.Module:
    """The recipe's model; the same seed gives the same first parameters."""
    build: dict[str, Callable[[], nn.Module]] = {
        "cnn-sgd": GroupNormCNN,
        "transformer-adamw": PatchTransformer,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build[recipe.name]()


def build_optimizer(recipe: Recipe, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The recipe's optimizer, at a learning rate an arm may have changed."""
    if recipe.name == "cnn-sgd":
        return torch.optim.SGD(
            model.parameters(), lr=lr, momentum=0.9, weight_decay=recipe.weight_decay
        )
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=recipe.weight_decay)


def build_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Linear warm-up from above 0 to the full learning rate, then half a cosine down to 0."""
    warmup = round(recipe.warmup * recipe.steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, recipe.steps - warmup))

    return LambdaLR(optimizer, factor)
