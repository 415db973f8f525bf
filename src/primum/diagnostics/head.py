"""What `attach` would see at the head, from the same samples and masks as everything else here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import pad
from torch.optim import Optimizer

from primum.diagnostics.gradients import loss_of_one, over_chunks
from primum.diagnostics.probe import Probe
from primum.find import candidates, find_head, is_linear
from primum.gram import Head
from primum.recipe import Recipe
from primum.rules import columns
from primum.update import Update, predict, shares


@dataclass(frozen=True, eq=False)
class SeenHead:
    """A recipe's arguments: the head's share of the backward pass, its update, its drift [B]."""

    head: Head
    update: Update
    drift: Tensor

    def weigh(self, recipe: Recipe) -> Tensor:
        """The extra weights that a recipe gives. [B]."""
        return recipe(self.head, self.update, self.drift).extra_weights


def see_head(probe: Probe) -> SeenHead:
    """The head's input and the gradient at its output, and the step it is about to take.

    The reducer's hooks sleep under `torch.func`. Here a hook adds a zero to the head's output, and
    the gradient with respect to that zero is the gradient at the output.
    """
    linear = head_of(probe)
    owners: dict[Tensor | None, Optimizer] = dict(probe.moved.values())
    weight, bias = linear.weight, linear._parameters.get("bias")
    if weight not in owners:
        raise ValueError("the head's weight is frozen, or no optimizer of the probe holds it")
    features, gradients = _factors(probe, linear)
    if bias in owners:
        features = pad(features, (0, 1), value=1.0)
    total = probe.sign * (gradients.flatten(0, -2).t() @ features.flatten(0, -2))
    if bias is None or bias not in owners:
        update = predict(owners[weight], weight, total)
    else:
        update = _side_by_side(
            predict(owners[weight], weight, total[:, :-1]),
            predict(owners[bias], bias, total[:, -1]),
        )
    head = Head(features, gradients, update.gain, has_bias=bias in owners)
    return SeenHead(head, update, head.along(update.step))


def head_of(probe: Probe) -> nn.Linear:
    """The head as given, or found as `attach` finds it."""
    if probe.head is None:
        return find_head(probe.model)
    named: Mapping[str, nn.Module] = dict(probe.model.named_modules())
    found = named.get(probe.head) if isinstance(probe.head, str) else probe.head
    if not is_linear(found):
        raise ValueError(
            f"head must be an nn.Linear, got {probe.head!r}; {candidates(probe.model)}"
        )
    return found


def _side_by_side(weight: Update, bias: Update) -> Update:
    """As `predict_head`, but gradients that wait in `.grad` do not count."""
    parts = (weight, bias)
    fractions = shares(weight.lr, bias.lr)
    step = columns(*(p.step * f for p, f in zip(parts, fractions, strict=True)))
    gains = [p.gain * f for p, f in zip(parts, fractions, strict=True)]
    lr = max((weight.lr, bias.lr), key=float)  # SYNC: if it is on a device
    if not any(isinstance(gain, Tensor) for gain in gains) and gains[0] == gains[1]:
        return Update(step, gains[0], lr)
    wide = (torch.ones_like(p.step) * gain for p, gain in zip(parts, gains, strict=True))
    return Update(step, columns(*wide), lr)


def _factors(probe: Probe, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Features and gradients of `L_i / B` at the output. [B, d] and [B, d_out], or [B, T, .]."""
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
    """Of each call of the head for one sample; a head may be called more than once."""
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
        raise ValueError("the model does not call its head, so nothing can be seen there")
    return shapes


@contextmanager
def _tapped(linear: nn.Linear, zeros: list[Tensor]) -> Iterator[list[Tensor]]:
    """Notes the inputs of the head and adds a zero to each of its outputs."""
    seen: list[Tensor] = []

    def tap(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        seen.append(args[0] if args else kwargs["input"])
        return output + zeros[len(seen) - 1]

    # First, as the reducer's: it sees what the linear layer itself put out.
    handle = linear.register_forward_hook(tap, with_kwargs=True, prepend=True)
    try:
        yield seen
    finally:
        handle.remove()
