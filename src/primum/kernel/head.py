"""The layer whose step is predicted and the optimizers that step it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.kernel.batch import HeadBatch
from primum.kernel.optimizers.dry_run import dry_run
from primum.kernel.optimizers.predict import Part, Update, narrow, predict_parts, rule_for
from primum.kernel.optimizers.rules import columns, sgd
from primum.kernel.scalars import Scalar, is_one


class Plain(RuntimeError):
    """Why a step stays plain although nothing broke. Counted as a fallback, if `counted`."""

    def __init__(self, reason: str, *, counted: bool = True) -> None:
        super().__init__(reason)
        self.counted = counted


class GradientScale(Protocol):
    """What the loop does to gradients between backward and step: loss scaling, clipping."""

    def unscale(self, gradient: Tensor) -> Tensor | None:
        """The inverse of the loss scale, as a 0-dim tensor; None without loss scaling."""

    def factor(self, part: str) -> Scalar:
        """The optimizer sees this times the unscaled gradient of the "weight" or "bias"."""


class NoScale:
    """A loop that changes no gradients."""

    def unscale(self, gradient: Tensor) -> Tensor | None:
        return None

    def factor(self, part: str) -> Scalar:
        return 1.0


class Head:
    """The layer and the optimizers that step it: the only object that knows about optimizers.

    Args:
        layer: A linear layer; only a weak reference is kept.
        optimizers: Those of its "weight" and, if some optimizer holds it, "bias".
        name: The layer's name in the model.
        scale: What happens to gradients before the step.
    """

    def __init__(
        self,
        layer: nn.Linear,
        optimizers: Mapping[str, Optimizer],
        name: str = "head",
        scale: GradientScale | None = None,
    ) -> None:
        self._layer = weakref.ref(layer)
        self.optimizers, self.name = dict(optimizers), name
        self.scale: GradientScale = scale or NoScale()
        self._places: dict[str, tuple[int, int]] = {}
        self._used: tuple[int, int] | None = None

    @property
    def layer(self) -> nn.Linear:
        """The layer; raises `Plain` if the model is gone."""
        layer = self._layer()
        if layer is None:
            raise Plain("the model no longer exists")
        return layer

    @property
    def alive(self) -> bool:
        return self._layer() is not None

    @property
    def version(self) -> int:
        """A count of the in-place changes of the weight; 0 if torch does not tell."""
        return getattr(self.weight, "_version", 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.layer.weight.shape
        return outputs, inputs

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a module is the layer itself, and no copy of it."""
        return module is self._layer()

    @property
    def weight(self) -> Tensor | None:
        """The weight as it is registered now; None once it is computed from others, or gone."""
        return registered(self._layer(), "weight")

    def group(self, part: str) -> dict[str, Any] | None:
        """The parameter group that holds a part now; None if none does."""
        param, groups = getattr(self._layer(), part, None), self.optimizers[part].param_groups
        group, place = self._places.get(part, (0, 0))  # found once, then checked
        held = groups[group]["params"] if group < len(groups) else []
        if place < len(held) and held[place] is param:
            return groups[group]
        for group, each in enumerate(groups):
            for place, held in enumerate(each["params"]):
                if held is param:
                    self._places[part] = group, place
                    return each
        return None

    def check(self) -> None:
        """Raise `Plain` if the next step of the layer cannot be predicted."""
        weight = registered(self.layer, "weight")
        if weight is None:
            raise Plain("the head's weight is now computed from other parameters; call .remove()")
        if not weight.requires_grad:
            raise Plain("the head is now frozen; unfreeze it or call .remove()")
        if self.group("weight") is None:
            raise Plain(f"the optimizer no longer holds the head's weight{self.why_lost()}")

    def why_lost(self) -> str:
        """What may have replaced the weight, and the way out, for a message."""
        return "; call .remove() and attach again with the one that trains it"

    # --- the coming step ------------------------------------------------------------------------

    @property
    def trained(self) -> list[str]:
        """The parts that a step moves: not a bias that was frozen after attaching."""
        layer = self.layer
        return [part for part in self.optimizers if getattr(layer, part).requires_grad]

    def parts(self) -> dict[str, Part]:
        """What an optimizer reads of each trained part."""
        layer, found = self.layer, {}
        for part in self.trained:
            group = self.group(part)
            if group is None:
                raise Plain(f"the optimizer no longer holds the head's {part}; attach again")
            found[part] = Part(getattr(layer, part), self.optimizers[part], group)
        return found

    def grads(self) -> dict[str, Tensor]:
        """What is in `.grad` of the parts that an optimizer holds. On this process."""
        layer = self._layer()
        found = {part: getattr(registered(layer, part), "grad", None) for part in self.optimizers}
        return {part: grad for part, grad in found.items() if grad is not None}

    def mark_used(self) -> None:
        """A step has used what is in `.grad` of the weight."""
        self._used = self._mark()

    @property
    def spent(self) -> bool:
        """Whether what is in `.grad` of the weight was used by a step, and not changed since."""
        return self._used is not None and self._used == self._mark()

    def _mark(self) -> tuple[int, int] | None:
        grad = self.grads().get("weight")  # no reference is kept: `model.to()` may swap it
        return None if grad is None else (id(grad), getattr(grad, "_version", 0))

    @property
    def holds_gradients(self) -> bool:
        """Whether earlier passes have left gradients on this process."""
        return bool(self.grads())

    def update(self, grad: Tensor, batch: HeadBatch, rows: slice | None = None) -> Update:
        """What the step will do to weight and bias, side by side; to some rows, or all.

        `grad` is the gradient of the batch, without what earlier passes have left. The gain is with
        respect to the gradient before the loop rescales it. [rows, d].
        """
        before = batch.before
        if before is None:
            before = self.accumulated(grad.dtype, rows)
        elif isinstance(before, Tensor):
            before = narrow(before, rows)
        return self.predict(self.parts(), grad if before is None else grad + before, rows)

    def predict(
        self, parts: Mapping[str, Part], total: Tensor, rows: slice | None = None
    ) -> Update:
        """The update for a total gradient, as the loop will rescale it. [rows, d]."""
        factor = self._factor(total)
        if is_one(factor):
            return predict_parts(parts, total, rows)
        update = predict_parts(parts, total * factor, rows)
        return replace(update, gain=update.gain * factor)

    def accumulated(self, dtype: torch.dtype, rows: slice | None = None) -> Tensor | None:
        """What is in `.grad` already, unscaled; None if nothing is. [rows, d]."""
        grads, layer = self.grads(), self.layer
        if not any(part in grads for part in self.trained):
            return None
        own = [
            grads[part] if part in grads else torch.zeros_like(getattr(layer, part))
            for part in self.trained
        ]
        return self.side_by_side([narrow(grad, rows).to(dtype) for grad in own])

    def side_by_side(self, grads: Sequence[Tensor]) -> Tensor:
        """Gradients of the trained parts, as they are in `.grad` -> unscaled, one tensor."""
        total = columns(*grads) if len(grads) == 2 else grads[0]
        unscale = self.scale.unscale(total)
        return total if unscale is None else total * unscale

    def _factor(self, grad: Tensor) -> Scalar:
        """What the loop does to the gradient: one number, or a row with one for each column."""
        factors = [self.scale.factor(part) for part in self.trained]
        first, last = factors[0], factors[-1]
        if first is last or (not isinstance(first, Tensor) and first == last):
            return first
        row = grad.new_ones(1, grad.shape[1])
        return torch.cat((row[:, :-1] * first, row[:, -1:] * last), 1)

    @property
    def maximizes(self) -> bool:
        """Whether the step goes uphill: then what it lowers is minus the loss."""
        group = self.group("weight")
        return group is not None and bool(group.get("maximize", False))

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be predicted without the others."""
        return all(rule_for(type(each)) is not dry_run for each in self.optimizers.values())

    @property
    def one_gain(self) -> bool:
        """Whether the gain is the same for all outputs, judged by the classes alone."""
        return all(rule_for(type(each)) in (sgd, dry_run) for each in self.optimizers.values())


def registered(module: nn.Module | None, name: str) -> Tensor | None:
    """A parameter as it is registered now; None once it is computed from others, or gone.

    Not by the attribute: to compute a parametrized weight may change its state.
    """
    held: dict[str, Tensor] = {} if module is None else vars(module).get("_parameters", {})
    return held.get(name)
