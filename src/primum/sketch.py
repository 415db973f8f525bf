"""3a - An approximate Gram operator for many tokens and large vocabularies, by chunks of tokens.

A head with V outputs and N tokens is replaced by one with k outputs, k much smaller than V:

    gradients at the output   folded into k columns with random signs (a count sketch)
    gain [V, d]               the product of a column [V] and a row [d]

so that a product costs N k d instead of N V d. What decides who is harmed stays exact: the batch
gradient, the step predicted from it, its size, and the drift. The angle between a token's gradient
and the step is too small to be sketched.

Two passes over chunks of tokens, and nothing of size N x V: pass 1 sums the batch's gradient, pass
2 makes drift and sketch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from primum.gram import Gain, MatrixFree
from primum.rules import Scalar
from primum.update import Update

Chunks: TypeAlias = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Goes through the tokens of a backward pass: each call yields all of them, once.

Yields pairs of the head's input [n, d] and the gradient at its output [n, V] for successive tokens;
n may vary. Both as they arrive: any floating-point type, loss scaling included, no column of ones
for the bias. Every call must yield the same values in the same order. A pair is not modified, and
not kept after the next is asked for: its memory may be used again.
"""

Predict: TypeAlias = Callable[[Tensor, slice | None], Update]
"""The update of some outputs of the head, all if None, from their batch gradient. [rows, d]."""

WIDTH = 512  # Columns that the outputs are folded into.
ENTRIES = 1 << 22  # Of a chunk of captured gradients: 16 MiB in float32, or a 32nd of them all.


@dataclass(frozen=True)
class Sketch:
    """What was made of the tokens.

    Attributes:
        gram: The operator, as that of a head with few outputs and gain 1. [N, N].
        drift: Exact, as in the problem that is not approximated. [N].
        size: Length of the predicted step, exact.
        lr: Of the head.
    """

    gram: MatrixFree
    drift: Tensor
    size: Tensor
    lr: Scalar


def slices(features: Tensor, gradients: Tensor) -> Chunks:
    """The chunks of tensors that hold all tokens: views, no copies. [N, d], [N, V]."""
    tokens, outputs = gradients.shape
    count = max(1, max(ENTRIES, gradients.numel() // 32) // outputs)

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, tokens, count):
            rows = min(count, tokens - first)
            yield features.narrow(0, first, rows), gradients.narrow(0, first, rows)

    return chunks


def sketch(
    chunks: Chunks,
    predict: Predict,
    *,
    dtype: torch.dtype,
    metric: str,
    has_bias: bool,
    sliceable: bool,
    unscale: Tensor | None = None,
    uphill: bool = False,
    width: int = WIDTH,
) -> Sketch:
    """Exact drift and step, and the sketched Gram operator, of all tokens that `chunks` yields.

    Args:
        chunks: See `Chunks`; called twice.
        predict: From the batch gradient, unscaled, to the update.
        dtype: To compute in.
        metric: Of the step's size, "gain" or "euclidean".
        has_bias: Whether the last column of the batch gradient is that of a bias.
        sliceable: Whether some outputs can be predicted without the others.
        unscale: Undoes the loss scaling of the gradients; None if there is none.
        uphill: Whether the optimizer maximises.
        width: Columns that the outputs are folded into.
    """

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x, g in chunks():
            x = x.to(dtype)
            yield pad(x, (0, 1), value=1.0) if has_bias else x, g.to(dtype)

    total = _batch_gradient(pairs())
    if unscale is not None:
        total *= unscale
    step, rows_gain, columns_gain, size, lr = _predicted(total, predict, metric, sliceable)
    signs = random_signs(len(step), step)
    signs = signs if rows_gain is None else signs * rows_gain.sqrt()
    drifts, inputs, folded = [], [], []
    for x, g in pairs():
        drifts.append(((g @ step) * x).sum(1))
        inputs.append(x if columns_gain is None else x * columns_gain**0.5)
        folded.append(fold(g, signs, width))
    drift, rows = torch.cat(drifts), torch.cat(folded)
    if unscale is not None:
        drift, rows = drift * unscale, rows * unscale
    gram = MatrixFree(torch.cat(inputs), rows, 1.0, has_bias=has_bias)
    return Sketch(gram, -drift if uphill else drift, size, lr)


def _batch_gradient(pairs: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the tokens' gradients of the head. -> [V, d]."""
    x, g = next(pairs)
    total = g.t() @ x
    for x, g in pairs:
        total.addmm_(g.t(), x)
    return total


def _predicted(
    total: Tensor, predict: Predict, metric: str, sliceable: bool
) -> tuple[Tensor, Tensor | None, Gain | None, Tensor, Scalar]:
    """Step (in the memory of `total`), gain by rows and by columns, size, lr.

    A few outputs at a time: of the gain, only means over rows and columns are kept.
    """
    outputs = len(total)
    count = max(1, (1 << 22) // total.shape[1]) if sliceable else outputs
    by_row: list[Tensor] = []
    by_column: Tensor | None = None
    square, gain, lr = total.new_zeros(()), None, 0.0
    for first in range(0, outputs, count):
        rows = slice(first, min(first + count, outputs))
        own = total.narrow(0, first, rows.stop - first)
        update = predict(own, rows if sliceable else None)
        square += update.size(metric).square()
        own.copy_(update.step)
        gain, lr = update.gain, update.lr
        if isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1:
            by_row.append(gain.mean(1))
            column = gain.sum(0)
            by_column = column if by_column is None else by_column + column
    if by_column is None:  # one gain for all outputs
        one = isinstance(gain, float) and gain == 1.0
        return total, None, None if one else gain, square.sqrt(), lr
    means = torch.cat(by_row)
    return total, means / means.mean(), by_column / outputs, square.sqrt(), lr


def fold(gradients: Tensor, signs: Tensor, width: int) -> Tensor:
    """Sums of every `width`-th column, each times its sign: a count sketch. [n, V] -> [n, width].

    Inner products of folded rows are those of the rows in the mean over the signs, whatever falls
    together; with words ordered by frequency, no two frequent ones do.
    """
    outputs = gradients.shape[1]
    if outputs <= width:
        return gradients * signs
    signed = gradients * signs
    whole = outputs // width
    folded = signed.narrow(1, 0, whole * width).view(-1, whole, width).sum(1)
    rest = outputs - whole * width
    if rest:
        folded.narrow(1, 0, rest).add_(signed.narrow(1, whole * width, rest))
    return folded


def random_signs(count: int, like: Tensor) -> Tensor:
    """Signs that look random and are always the same, made on the device of `like`. [count].

    A hash of the numbers from 0 on: no generator whose state a user might miss, no copy from the
    host.
    """
    mixed = torch.arange(count, device=like.device) + 0x9E37
    for shift, factor in ((13, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0x7FFFFFFF
    return ((mixed >> 16 & 1) * 2 - 1).to(like.dtype)
