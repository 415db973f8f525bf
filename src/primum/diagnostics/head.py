"""Capture the head's input and output gradient as `attach` would, with the probe's dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.optim import Optimizer

from primum.diagnostics.gradients import loss_of_one, over_chunks
from primum.diagnostics.probe import Probe
from primum.kernel.batch import HeadBatch
from primum.kernel.builder import Builder
from primum.kernel.gram import MatrixFree
from primum.kernel.head import Head, registered
from primum.kernel.recipe import Primum, Recipe
from primum.setup.find import find_head, given_head


@dataclass(frozen=True, eq=False)
class SeenHead:
    """What a recipe gets from the head in a backward pass."""

    head: Head
    batch: HeadBatch

    def weights(self, recipe: Recipe) -> Tensor:
        """The extra weights computed by a recipe; zero for one sample alone. [B]."""
        if len(self.batch.inputs) < 2:
            return self.batch.inputs.new_zeros(len(self.batch.inputs))
        return recipe(Builder().build(self.head, self.batch, recipe)).extra_weights

    def measure(self) -> tuple[MatrixFree, Tensor]:
        """Gram operator and drift of the head. [B, B], [B]."""
        problem = Builder().build(self.head, self.batch, Primum(radius=0))
        assert isinstance(problem.gram, MatrixFree)
        return problem.gram, problem.drift


def see_head(probe: Probe) -> SeenHead:
    """Capture the head's input and the gradient at its output; `.grad` is ignored.

    The reducer's hooks do nothing under `torch.func`. Here a hook adds a zero to the head's output,
    and the gradient with respect to that zero is the gradient at the output.
    """
    linear = head_of(probe)
    optimizers: dict[Tensor | None, Optimizer] = dict(probe.moved.values())
    parts: dict[str, Tensor | None] = {"weight": linear.weight, "bias": registered(linear, "bias")}
    owners = {name: optimizers[part] for name, part in parts.items() if part in optimizers}
    if "weight" not in owners:
        raise ValueError(
            "the head's weight is frozen or in none of the probe's optimizers; pass the optimizer "
            "that trains it, or head= a layer that is trained"
        )
    features, gradients = _factors(probe, linear)
    # Undo the probe's negation of losses that are maximized.
    return SeenHead(Head(linear, owners), HeadBatch(features, probe.sign * gradients, before=0.0))


def head_of(probe: Probe) -> nn.Linear:
    """The head that was passed, or the one that `attach` would find."""
    if probe.head is None:
        return find_head(probe.model)
    return given_head(probe.model, probe.head)


def _factors(probe: Probe, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Features, and gradients of `L_i / B` at the output. [B, d] and [B, d_out], or [B, T, .]."""
    shapes = _output_shapes(probe, linear)

    def of_one(inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        def loss(zeros: list[Tensor]) -> tuple[Tensor, Tensor]:
            with _tapped(linear, zeros) as seen:
                value = loss_of_one(probe, {}, inputs, targets)
            return value, torch.cat([each.flatten(0, -2) for each in seen])

        zeros = [torch.zeros(s, dtype=linear.weight.dtype, device=probe.device) for s in shapes]
        gradients, features = grad(loss, has_aux=True)(zeros)
        return features, torch.cat([each.flatten(0, -2) for each in gradients])

    chunks = [chunk for _, chunk in over_chunks(probe, of_one)]
    features, gradients = (torch.cat(part).to(probe.dtype) for part in zip(*chunks, strict=True))
    if features.shape[1] == 1:  # one position per sample
        features, gradients = features.squeeze(1), gradients.squeeze(1)
    return features, gradients / probe.batch_size


def _output_shapes(probe: Probe, linear: nn.Linear) -> list[torch.Size]:
    """Output shapes of the head's calls for one sample; it may be called more than once."""
    shapes: list[torch.Size] = []

    def of_one(inputs: Any, targets: Any) -> Tensor:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            shapes.append(output.shape)

        handle = linear.register_forward_hook(note)
        try:
            return loss_of_one(probe, {}, inputs, targets)
        finally:
            handle.remove()

    next(over_chunks(probe, of_one))
    if not shapes:
        raise ValueError("the forward pass never calls the head; pass head= a layer that it calls")
    return shapes


@contextmanager
def _tapped(linear: nn.Linear, zeros: list[Tensor]) -> Iterator[list[Tensor]]:
    """Record the head's inputs and add a zero to each of its outputs."""
    seen: list[Tensor] = []

    def tap(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        seen.append(args[0] if args else kwargs["input"])
        return output + zeros[len(seen) - 1]

    # Runs first, like the reducer's hook, so it gets the layer's own output.
    handle = linear.register_forward_hook(tap, with_kwargs=True, prepend=True)
    try:
        yield seen
    finally:
        handle.remove()
