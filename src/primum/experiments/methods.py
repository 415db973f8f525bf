"""What the trainer needs from an arm: a backward pass, a reducer, a radius per step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import primum
from primum import Reducer, StepReport
from primum.diagnostics import Probe, measure
from primum.experiments.arms import Arm
from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError
from primum.experiments.losses import cross_entropies, focal_losses
from primum.experiments.schedules import radius_share
from primum.experiments.settings import RunSettings
from primum.experiments.weightings import (
    ByLoss,
    Kept,
    Normalised,
    Permuted,
    Reduced,
    UpGrad,
    VaryingPaper,
)
from primum.kernel.recipe import Primum, Recipe
from primum.paper import PaperSettings
from primum.paper.multilayer import MultiLayer, split

NETWORK_ITERS = 50  # for the whole network's problem
CHUNK = 32  # samples whose gradients are computed at a time


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
        self.recipe: Reduced | VaryingPaper | None = None
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
        self.recipe = recipe if isinstance(recipe, Reduced | VaryingPaper) else None

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
        self.set_recipe(losses, len(batch.ids), step, steps)
        loss = losses.mean()
        target = self.weighted(losses, batch)
        (target if self.scaler is None else self.scaler.scale(target)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def set_recipe(self, losses: Tensor, count: int, step: int, steps: int) -> None:
        """Set what changes between steps: the recipe's radius, and the losses of its rows."""
        if self.recipe is not None:
            self.recipe.radius = self.arm.radius * radius_share(self.arm, step, steps)
        if isinstance(self.recipe, Reduced):
            self.recipe.losses = self.row_losses(losses.detach(), count)

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

    def weighted(self, losses: Tensor, batch: Batch) -> Tensor:
        """The scalar to differentiate; a recipe's weights are applied in its backward pass."""
        return losses.mean()

    def remove(self) -> None:
        """Detach from the model."""
        if self.reducer is not None:
            self.reducer.remove()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.reducer is None else self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.reducer is not None:
            self.reducer.load_state_dict(state)


class Part(Method):
    """Applies the weights only to the head's gradient, or only to the backbone's."""

    def backward(self, batch: Batch, step: int, steps: int, *, observed: bool) -> Tensor:
        """Weighted gradients for one part and plain ones for the other, by two backward passes.

        The pass that stops at the head is cheap. The plain pass comes last, so that the reducer
        does not mistake a plain gradient of the head for the one that it returned.
        """
        assert self.reducer is not None
        assert self.reducer.head is not None
        if self.scaler is not None:
            raise UserError("part does not work with fp16; choose --precision bf16 or fp32")
        with autocast(self.settings):
            losses = self.losses(self.model(batch.inputs), batch.targets)
        self.set_recipe(losses, len(batch.ids), step, steps)
        loss = losses.mean()
        head = [param for param in self.reducer.head.parameters() if param.requires_grad]
        every = [param for param in self.model.parameters() if param.requires_grad]
        # The hook only acts if the head's parameters get gradients, so they are included.
        weighted, plain = (head, every) if self.arm.part == "head" else (every, head)
        first = torch.autograd.grad(loss, weighted, retain_graph=True)
        with self.reducer.paused():
            last = torch.autograd.grad(loss, plain)
        gradients = dict(zip(weighted, first, strict=True))
        for param, gradient in zip(plain, last, strict=True):
            if param not in gradients or self.arm.part == "backbone":
                gradients[param] = gradient
        for param, gradient in gradients.items():
            param.grad = gradient
        return loss.detach()


class WholeNetwork(Method):
    """Applies the weights of the whole network's problem, solved at every step."""

    def observed(self, place: int) -> bool:
        return False  # the hook would get gradients that are already weighted

    def weighted(self, losses: Tensor, batch: Batch) -> Tensor:
        probe = Probe(
            self.model,
            self.optimizer,
            nn.CrossEntropyLoss(),
            batch.inputs,
            batch.targets,
            chunk_size=CHUNK,
        )
        problem = measure(probe).problem(radius=self.arm.radius)
        self.weights = primum.solve(problem, NETWORK_ITERS).extra_weights.to(losses.dtype)
        return ((1 + self.weights) * losses).mean()


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


class Explicit(Unhooked):
    """Explicit gradients of the last blocks of a chain (paper, Alg. 8), with radius 0."""

    def attach(self) -> None:
        self.explicit: MultiLayer | None = None
        if not isinstance(self.model, nn.Sequential):
            raise UserError("arm explicit needs a chain of blocks; use --model resnet20-chain")
        if self.arm.blocks > 0:
            self.backbone, last = split(self.model, self.arm.blocks)
            zero = PaperSettings(radius=0.0)
            self.explicit = MultiLayer(last, self.optimizer, F.cross_entropy, zero)

    def backward(self, batch: Batch, step: int, steps: int, *, observed: bool) -> Tensor:
        if self.explicit is None:
            return super().backward(batch, step, steps, observed=observed)
        return self.explicit.backward(self.backbone(batch.inputs), batch.targets).detach()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.explicit is None else self.explicit.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.explicit is not None:
            self.explicit.load_state_dict(state)


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
    # These import this file.
    from primum.experiments.rivals import GroupMinNorm, UpGradNetwork
    from primum.experiments.second_look import SecondLook

    kinds = {"network": WholeNetwork, "explicit": Explicit, "upgrad-network": UpGradNetwork,
             "mgda": GroupMinNorm, "damped": Damped}  # fmt: skip
    kind = Part if settings.arm.part != "both" else kinds.get(settings.arm.name, Method)
    kind = kind if settings.arm.second_look == "none" else SecondLook
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
            if arm.second_look != "none":
                return Kept(own)
            changes = arm.radius_schedule != "constant" or arm.until < 1
            return Reduced(own) if changes else own
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


def autocast(settings: RunSettings) -> Any:
    """Autocast context for the run's precision."""
    dtype = torch.float16 if settings.precision == "fp16" else torch.bfloat16
    kind = torch.device(settings.device).type
    return torch.autocast(kind, dtype=dtype, enabled=settings.precision != "fp32")
