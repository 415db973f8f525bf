"""From an arm to what a training loop needs of it: a loss, a reducer, a radius for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import primum
from primum import Reducer
from primum.experiments.augment.mix import soft_targets
from primum.experiments.sweeps.arms import Arm
from primum.experiments.sweeps.weightings import (
    ByLoss,
    Normalised,
    Permuted,
    Reduced,
    UpGrad,
    VaryingPaper,
)
from primum.paper import PaperSettings
from primum.recipe import Primum, Recipe

WATCH_EVERY = 10  # steps of an arm without weights, from one that is watched to the next
SURE = 1e-12  # `1 - p` of a sample taken for certain: a root of 0 has no gradient


@dataclass
class Method:
    """One arm at work on one model.

    Attributes:
        arm: Which.
        reducer: Attached, or watching where the arm has no weights.
        recipe: That of the reducer, if it has a radius to change or wants to know the losses.
        weighs: Whether the reducer is attached.
    """

    arm: Arm
    reducer: Reducer
    recipe: Reduced | VaryingPaper | None
    weighs: bool

    def watched(self, place: int) -> bool:
        """Whether the step at this place in its epoch is reported on, which takes time."""
        return self.weighs or place % WATCH_EVERY == 0

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """What the arm minimises the mean of. [B, classes], [B] or [B, classes] -> [B]."""
        if self.arm.name == "focal":
            return focal_losses(logits, targets, self.arm.focal_gamma, smoothing)
        return cross_entropies(logits, targets, smoothing)

    def prepare(self, step: int, steps: int, losses: Tensor, *, watched: bool) -> None:
        """Before the backward pass of a step."""
        self.reducer.enabled = watched
        if self.recipe is not None:
            self.recipe.radius = self.arm.radius * radius_share(self.arm, step, steps)
        if isinstance(self.recipe, Reduced):
            self.recipe.losses = losses.detach()


def make_method(
    arm: Arm, model: nn.Module, optimizer: Optimizer, *, seed: int, scaler: Any = None
) -> Method:
    """Attach the arm to the model."""
    recipe = make_recipe(arm, seed)
    if recipe is None:
        return Method(arm, primum.observe(model, optimizer, scaler=scaler), None, weighs=False)
    reducer = primum.attach(model, optimizer, recipe=recipe, scaler=scaler)
    told = recipe if isinstance(recipe, Reduced | VaryingPaper) else None
    return Method(arm, reducer, told, weighs=True)


def cross_entropies(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """[B, classes], labels [B] or soft targets [B, classes] -> [B]."""
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing, reduction="none")


def focal_losses(logits: Tensor, targets: Tensor, gamma: float, smoothing: float = 0.0) -> Tensor:
    """Focal loss (Lin et al., 2017): cross entropy, each term times `(1 - p) ** gamma`.

    [B, classes], labels [B] or soft targets [B, classes] -> [B].
    """
    classes = logits.shape[1]
    if targets.dim() == 1:
        soft = soft_targets(targets, classes, smoothing)
    else:
        soft = (1 - smoothing) * targets + smoothing / classes
    logs = F.log_softmax(logits.float(), dim=1)
    return -(soft * (1 - logs.exp()).clamp_min(SURE).pow(gamma) * logs).sum(1)


def radius_share(arm: Arm, step: int, steps: int) -> float:
    """Radius of a step, as a share of the arm's largest."""
    if arm.radius_schedule == "constant":
        return 1.0
    way, shape = arm.radius_schedule.split("-")
    done = step / max(1, steps - 1)
    risen = done if shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * done)
    return risen if way == "grow" else 1 - risen


def make_recipe(arm: Arm, seed: int) -> Recipe | None:
    """How the arm weighs; None if it does not."""
    own = Primum(arm.radius, arm.max_extra_weight, arm.max_iters)
    match arm.name:
        case "primum":
            return own if arm.radius_schedule == "constant" else Reduced(own)
        case "paper":
            return VaryingPaper(PaperSettings(arm.radius, arm.max_extra_weight))
        case "permuted":
            return Permuted(own, seed)
        case "normalised":
            return Normalised(own)
        case "loss-weighted":
            return ByLoss(own)
        case "upgrad":
            return UpGrad(mean_one=arm.upgrad_scale == "mean-1")
    return None
