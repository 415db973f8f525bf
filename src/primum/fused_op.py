"""The loss of a head that is never called as one operation, for eager and for compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from primum.capture import LISTENERS, UNRECORDED
from primum.compat import no_autocast
from primum.rules import wide
from primum.streamed import Gradients, Streamed, visit

Settings = tuple[int, float, int, torch.dtype]  # ignore_index, smoothing, width, type of products


def is_fused(node: Node, number: int) -> bool:
    """Whether a node of the graph makes the losses of `TokenLosses` for this listener."""
    own = node.name() == f"{TokenLosses.__name__}Backward"
    return own and number == getattr(node, "number", None)


def losses_of(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    width: int,
    low: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Loss and normaliser of each token. -> [N], [N]."""
    settings = ignore_index, smoothing, width, low
    with no_autocast(features.device.type):
        return Streamed(features, weight, bias, targets, *settings).cast().losses()


def gradients_of(
    rows: Tensor,
    normaliser: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    width: int,
    low: torch.dtype,
    leading: list[int],
    number: int,
    training: bool,
    together: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, weight and bias, weighted; empty where none is needed."""
    settings = ignore_index, smoothing, width, low
    source = Streamed(features, weight, bias, targets, *settings, normaliser, rows)
    wanted = needed[0], needed[1], needed[2]
    listener = LISTENERS.get(number)
    owner: Any = None if listener is None else listener.owner  # the Reducer
    with no_autocast(features.device.type):
        found: Gradients | None = None
        if owner is not None and needed[1]:
            found = owner.on_fused(source, leading, training, together, wanted)
        if found is None:
            found = Gradients.like(source, wanted)
            visit(source, found)
    return (
        features.new_empty(0) if found.features is None else found.features.to(features.dtype),
        features.new_empty(0) if found.weight is None else found.weight,
        features.new_empty(0) if found.bias is None else found.bias,
    )


SETTINGS = "int ignore_index, float smoothing, int width, ScalarType low"

token_losses = torch.library.custom_op(
    "primum::token_losses",
    losses_of,
    mutates_args=(),
    schema=f"(Tensor features, Tensor weight, Tensor? bias, Tensor targets, {SETTINGS}) "
    "-> (Tensor, Tensor)",
)
token_gradients = torch.library.custom_op(
    "primum::token_gradients",
    gradients_of,
    mutates_args=(),
    schema="(Tensor rows, Tensor normaliser, Tensor features, Tensor weight, Tensor? bias, "
    f"Tensor targets, {SETTINGS}, SymInt[] leading, int number, bool training, bool together, "
    "bool[] needed) -> (Tensor, Tensor, Tensor)",
    **UNRECORDED,
)


@token_losses.register_fake
def _(features: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, dtype = features.shape[0], wide(others[-1])
    return features.new_empty(tokens, dtype=dtype), features.new_empty(tokens, dtype=dtype)


@token_gradients.register_fake
def _(
    rows: Tensor,
    normaliser: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needed = others[-1]
    return (
        torch.empty_like(features) if needed[0] else features.new_empty(0),
        torch.empty_like(weight) if needed[1] else features.new_empty(0),
        torch.empty_like(bias) if needed[2] and bias is not None else features.new_empty(0),
    )


class TokenLosses(torch.autograd.Function):
    """The losses of all tokens, whose backward is an operation that compilers keep."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: Settings,
        leading: list[int],
        number: int,
        training: bool,
        together: bool,
    ) -> Tensor:
        losses: Tensor
        losses, normaliser = token_losses(features, weight, bias, targets, *settings)
        ctx.save_for_backward(normaliser, features, weight, bias, targets)
        ctx.number = number
        ctx.others = (*settings, leading, number, training, together)
        return losses

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # what follows would be missing in silence
            raise RuntimeError(
                "linear_cross_entropy has no second derivative (create_graph=True); call the head "
                "and compute the loss from its output"
            )
        needed = list(ctx.needs_input_grad[:3])
        found = token_gradients(rows, *ctx.saved_tensors, *ctx.others, needed)
        given = [each if wanted else None for each, wanted in zip(found, needed, strict=True)]
        return (*given, None, None, None, None, None, None)
