"""What the trainer needs from an arm: a backward pass and a reducer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import primum
from lab.arms import Arm
from lab.epochs import Batch
from lab.errors import UserError
from lab.losses import cross_entropies, focal_losses
from lab.settings import RunSettings
from lab.weightings import (
    ByLoss,
    Normalised,
    Permuted,
    Reduced,
    UpGrad,
)
from primum import Reducer, StepReport
from primum.kernel.recipe import Primum, Recipe
from primum.paper import Paper, PaperSettings


class Method:
    """An arm attached to a model: weights from a recipe, or none.

    Args:
        settings: Settings of the run.
        model: The model to train; wrapped in DistributedDataParallel on several ranks.
        optimizer: Its optimizer.
        scaler: GradScaler, for fp16.

    Attributes:
        weighs: Whether extra weights are applied; otherwise steps are only observed.
    """

    def __init__(
        self,
        settings: RunSettings,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.settings, self.arm = settings, settings.arm
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.weighs = False
        self.reducer: Reducer | None = None
        self.recipe: Reduced | None = None
        self.attach()

    def attach(self) -> None:
        """Create the reducer, or whatever else the arm needs."""
        recipe = make_recipe(self.arm, self.settings.seed)
        if recipe is None:
            look = self.settings.look
            radius = self.arm.radius if look is None else look.radius
            attach = partial(primum.observe, radius=radius)
        else:
            attach = partial(primum.attach, recipe=recipe)
        self.reducer = attach(self.model, self.optimizer, per=self.arm.per, scaler=self.scaler)
        self.weighs = recipe is not None
        self.recipe = recipe if isinstance(recipe, Reduced) else None

    @property
    def last(self) -> StepReport | None:
        """Report of the last observed step."""
        return None if self.reducer is None else self.reducer.last

    def observed(self, place: int) -> bool:
        """Whether to report on the step at this place in its period, which takes time."""
        return self.weighs or place % self.settings.observe_every == 0

    def backward(self, batch: Batch, step: int, steps: int, *, observed: bool) -> Tensor:
        """Compute the gradients of a step; returns the mean loss."""
        with autocast(self.settings):
            logits = self.model(batch.inputs)
        losses = self.losses(logits, batch.targets)
        if self.reducer is not None:
            self.reducer.enabled = observed
        if self.recipe is not None:
            self.recipe.losses = self.row_losses(losses.detach(), len(batch.ids))
        loss = target = losses.mean()
        (target if self.scaler is None else self.scaler.scale(target)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Per-sample losses. [B, classes], [B] or [B, classes] -> [B]; for text, [B * T]."""
        smoothing = self.settings.label_smoothing
        if self.arm.name == "focal":
            return focal_losses(logits, targets, self.arm.focal_gamma, smoothing)
        return cross_entropies(logits, targets, smoothing)

    def row_losses(self, losses: Tensor, count: int) -> Tensor:
        """One loss per weight: for text, per token or per sequence."""
        whole = self.settings.task == "language" and self.arm.per == "sample"
        return losses.view(count, -1).sum(1) if whole else losses

    def remove(self) -> None:
        """Detach from the model."""
        if self.reducer is not None:
            self.reducer.remove()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.reducer is None else self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.reducer is not None:
            self.reducer.load_state_dict(state)


class Unhooked(Method):
    """An arm without a reducer: its steps have no reports."""

    def attach(self) -> None:
        """Attach nothing."""

    def observed(self, place: int) -> bool:
        return False


class Damped(Unhooked):
    """Plain training with a damped common shift of the logits.

    The mean gradient at the head's output, over the batch, raises the logits of some classes and
    lowers those of others, equally for all samples. A share `damping` of it is subtracted from each
    sample's gradient. No sample gets extra weight, so any gain comes from damping that direction.
    """

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        def damp(gradient: Tensor) -> Tensor:
            return gradient - self.arm.damping * gradient.mean(0)

        if logits.requires_grad:
            logits.register_hook(damp)  # type: ignore[no-untyped-call]
        return super().losses(logits, targets)


def make_method(
    settings: RunSettings,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> Method:
    """Attach the run's arm to a model.

    Raises:
        UserError: The model cannot be used.
    """
    kind = Damped if settings.arm.name == "damped" else Method
    try:
        return kind(settings, model, optimizer, scaler)
    except UserError:
        raise
    except ValueError as error:
        way_out = (
            "; here, give the model a get_classifier() method" if "head=" in str(error) else ""
        )
        raise UserError(f"{settings.model}: {error}{way_out}") from error


def make_recipe(arm: Arm, seed: int) -> Recipe | None:
    """The recipe of an arm; None for arms whose weights do not come from a recipe."""
    own = Primum(radius=arm.radius, max_extra_weight=arm.max_extra_weight, max_iters=arm.max_iters)
    match arm.name:
        case "primum":
            return own
        case "paper":
            return Paper(PaperSettings(arm.radius, arm.max_extra_weight))
        case "permuted":
            return Permuted(own, seed)
        case "normalised":
            return Normalised(own)
        case "loss-weighted":
            return ByLoss(own)
        case "upgrad":
            return UpGrad(mean_one=arm.upgrad_scale == "mean-1")
    return None


def autocast(settings: RunSettings) -> Any:
    """Autocast context for the run's precision."""
    dtype = torch.float16 if settings.precision == "fp16" else torch.bfloat16
    kind = torch.device(settings.device).type
    return torch.autocast(kind, dtype=dtype, enabled=settings.precision != "fp32")
