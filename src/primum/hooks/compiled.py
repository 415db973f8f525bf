"""The head in graphs made by torch.compile: an operation at its output that compilers keep."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_NUMBERS = itertools.count()


class Source:
    """What a compiled graph can name by number alone.

    Attributes:
        number: Its name.
    """

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        SOURCES[self.number] = self

    def arrived(self, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """The gradient to hand on, or None for the one that arrived."""
        raise NotImplementedError


SOURCES: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()

# For operations that run Python each time, which a CUDA graph (mode="reduce-overhead") would
# record once and repeat. torch 2.8 has no such tag.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_UNRECORDED: Any = {} if _TAG is None else {"tags": (_TAG,)}


@torch.library.custom_op(
    "primum::arrive",
    mutates_args=(),
    schema="(Tensor gradient, Tensor inputs, int number) -> Tensor",
    **_UNRECORDED,
)
def arrive(gradient: Tensor, inputs: Tensor, number: int) -> Tensor:
    """In a compiled backward pass: the gradient to hand on, in new memory."""
    source = SOURCES.get(number)
    weighted = None if source is None else source.arrived(inputs, gradient)
    return gradient.clone() if weighted is None else weighted


@arrive.register_fake
def _(gradient: Tensor, inputs: Tensor, number: int) -> Tensor:
    return torch.empty_like(gradient)


class Carry(torch.autograd.Function):
    """The identity at the head's output, whose backward is an operation that compilers keep."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.number = number
        return output.clone()  # a view may not be changed in place; inductor leaves the copy out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        return arrive(gradient, inputs, ctx.number), None, None
