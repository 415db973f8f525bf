"""3a - An approximate Gram operator for many tokens and large vocabularies, by chunks of tokens.

A head with V outputs is replaced by one with k of them, k much smaller than V:

    gradients at the output   folded into k columns with random signs (a count sketch)
    gain [V, d]               a column [V] times a row [d]

so that a product with the operator costs N k d instead of N V d, for N tokens. What decides who is
harmed stays exact: the batch gradient, the step predicted from it, its size, and the drift. The
angle between a token's gradient and the step is too small to be sketched.

Two passes over chunks of tokens, and nothing of size N x V: the first sums the batch's gradient,
the second makes drift and sketch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from primum.gram import Gain, Gram, MatrixFree, choose, operations
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

WIDTH = 256  # Columns that the outputs are folded into.
ENTRIES = 1 << 22  # Of a chunk of captured gradients: 16 MiB in float32, or a 32nd of them all.
FEW = 1 << 30  # Operations of an exact solution below which nothing is approximated.
FLOOR = 1e-20  # Weight of an entry of the head that got no gradient, when the gain is factorised.


@dataclass(frozen=True)
class Tokens:
    """All tokens of a backward pass, and what is known about the head they went through.

    Attributes:
        chunks: See `Chunks`.
        count: How many tokens.
        predict: From the batch gradient, unscaled, to the update.
        dtype: To compute in.
        has_bias: Whether the last column of the batch gradient is that of a bias.
        sliceable: Whether some outputs can be predicted without the others.
        uphill: Whether the optimizer maximises.
        unscale: Undoes the loss scaling of the gradients; None if there is none.
    """

    chunks: Chunks
    count: int
    predict: Predict
    dtype: torch.dtype
    has_bias: bool = False
    sliceable: bool = True
    uphill: bool = False
    unscale: Tensor | None = None

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The chunks in working precision, with ones for the bias; still scaled."""
        for features, gradients in self.chunks():
            x, g = features.detach().to(self.dtype), gradients.detach().to(self.dtype)
            yield pad(x, (0, 1), value=1.0) if self.has_bias else x, g

    def along(self, displacement: Tensor) -> Tensor:
        """Each token's first-order loss change. [V, d] -> [N]."""
        changes = [((g @ displacement) * x).sum(1) for x, g in self.pairs()]
        return self.unscaled(torch.cat(changes))

    def unscaled(self, values: Tensor) -> Tensor:
        return values if self.unscale is None else values * self.unscale


def slices(features: Tensor, gradients: Tensor) -> Chunks:
    """The chunks of tensors that hold all tokens: views, no copies. [N, d], [N, V]."""
    tokens, outputs = gradients.shape
    count = max(1, max(ENTRIES, gradients.numel() // 32) // outputs)

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, tokens, count):
            rows = min(count, tokens - first)
            yield features.narrow(0, first, rows), gradients.narrow(0, first, rows)

    return chunks


def worthwhile(tokens: int, inputs: int, outputs: int, *, products: int, factorises: bool) -> bool:
    """Whether to approximate: the exact operator costs N V d / 4 or more, and twice the sketch.

    The head itself costs 6 N V d, and drift and step 4 N V d in either form. Small problems stay
    exact. Where `factorises`, the gain is the same for all outputs.
    """
    exact = min(operations(tokens, 1, inputs, outputs, products=products, factorises=factorises))
    least = max(FEW, tokens * inputs * outputs // 4)
    return outputs > WIDTH and exact > max(least, 2 * _cost(tokens, inputs, outputs, products))


def _cost(tokens: int, inputs: int, outputs: int, products: int) -> int:
    """Operations of the sketch; reading all gradients once more is memory-bound."""
    pair = operations(tokens, 1, inputs, WIDTH, products=products, factorises=True)
    return min(pair) + 8 * tokens * outputs


def sketch(
    tokens: Tokens, *, metric: str, products: int, width: int = WIDTH
) -> tuple[Gram, Tensor, Tensor, Scalar]:
    """The sketched operator of the tokens, and exactly: drift, the step's size, the head's lr.

    Args:
        tokens: Their chunks are made twice.
        metric: Of the step's size, "gain" or "euclidean".
        products: With the operator, about; decides on its form.
        width: Columns that the outputs are folded into.

    Returns:
        gram [N, N], drift [N], size and lr scalars: what a recipe takes.
    """
    total, squares = _batch_gradient(tokens)
    step, by_output, by_input, size, lr = _predicted(total, squares, tokens, metric)
    signs = random_signs(len(step), step)
    signs = signs if by_output is None else signs * by_output.sqrt()
    drift = step.new_empty(tokens.count)
    inputs = step.new_empty(tokens.count, step.shape[1])
    folded = step.new_empty(tokens.count, min(width, len(step)))
    first = 0
    for x, g in tokens.pairs():
        rows = slice(first, first + len(x))
        drift[rows] = ((g @ step) * x).sum(1)
        inputs[rows] = x if by_input is None else x * by_input**0.5
        folded[rows] = fold(g, signs, width)
        first = rows.stop
    if first != tokens.count:
        raise ValueError(f"the chunks have {first} tokens in total, expected {tokens.count}")
    drift, folded = tokens.unscaled(drift), tokens.unscaled(folded)
    gram = MatrixFree(inputs, folded, 1.0, has_bias=tokens.has_bias)
    return _form(gram, len(step), products), -drift if tokens.uphill else drift, size, lr


def _form(gram: MatrixFree, outputs: int, products: int) -> Gram:
    """A matrix where that is cheaper, and small beside the gradients that arrived."""
    tokens = len(gram.features)
    small = tokens * tokens <= max(1 << 20, tokens * outputs // 32)
    return choose(gram, products) if small else gram


def _batch_gradient(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' gradients [V, d], and of their squared inputs [d]."""
    pairs = iter(tokens.pairs())
    x, g = next(pairs)
    total, squares = g.t() @ x, x.square().sum(0)
    for x, g in pairs:
        torch.addmm(total, g.t(), x, out=total)  # counted by FlopCounterMode, unlike `addmm_`
        squares += x.square().sum(0)
    if tokens.unscale is not None:
        total *= tokens.unscale
    return total, squares


def _predicted(
    total: Tensor, squares: Tensor, tokens: Tokens, metric: str
) -> tuple[Tensor, Tensor | None, Gain | None, Tensor, Scalar]:
    """Step, gain by output and by input, size and lr, from the batch gradient and `squares` [d].

    A few outputs at a time, and in the memory of `total`: neither the gain nor anything else of the
    head's size is kept.
    """
    factors = Factors(squares, torch.linalg.vector_norm(total, torch.inf))
    by_output: list[Tensor] = []
    square = total.new_zeros(())
    gain: Gain | None = None
    lr: Scalar = 0.0
    for rows in _blocks(total) if tokens.sliceable else [slice(0, len(total))]:
        own = total.narrow(0, rows.start, rows.stop - rows.start)
        update = tokens.predict(own, rows if tokens.sliceable else None)
        square += update.size(metric).square()
        gain, lr = update.gain, update.lr
        if isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1:
            by_output.append(factors.add(own, gain))
        own.copy_(update.step)
    if not by_output:  # one gain for all outputs
        one = isinstance(gain, float) and gain == 1.0
        return total, None, None if one else gain, square.sqrt(), lr
    return total, torch.cat(by_output), factors.by_input, square.sqrt(), lr


class Factors:
    """The gain as a column times a row, from blocks of outputs.

    An output's gain is a mean over its entries, half by the squares of the batch gradient and half
    by those of the inputs. The factors of the inputs are then such that the batch gradient has its
    true length in the metric of the gain, input by input. Plain means would count the many entries
    of a large head that get hardly any gradient.

    Args:
        squares: Of the inputs, summed over tokens. [d].
        largest: Entry of the batch gradient; that of the blocks so far, if it is not known.
    """

    def __init__(self, squares: Tensor, largest: Tensor | float = 0.0) -> None:
        tiny = torch.finfo(squares.dtype).tiny
        self._shares = squares / squares.sum().clamp_min(tiny)
        self._above, self._below = torch.zeros_like(squares), torch.zeros_like(squares)
        self._largest = (squares.new_zeros(()) + largest).clamp_min(tiny)

    def add(self, grad: Tensor, gain: Tensor) -> Tensor:
        """The gain by output, from the batch gradient of some outputs. [n, d], [n, d] -> [n]."""
        largest = torch.maximum(self._largest, torch.linalg.vector_norm(grad, torch.inf))
        shrink = (self._largest / largest).square()
        weights = (grad / largest).square_().add_(FLOOR)
        own_shares = weights / weights.sum(1, keepdim=True)
        means = own_shares.add_(self._shares).mul_(gain).sum(1) / 2
        self._below = self._below * shrink + means @ weights
        self._above = self._above * shrink + weights.mul_(gain).sum(0)
        self._largest = largest
        return means

    @property
    def by_input(self) -> Tensor:
        """The gain by input. [d]."""
        return self._above / self._below


def _blocks(head: Tensor) -> Iterator[slice]:
    """Ranges of outputs: a block takes 4 MiB in float32, or a 32nd of the head."""
    count = max(1, max(1 << 20, head.numel() // 32) // head.shape[1])
    for first in range(0, len(head), count):
        yield slice(first, min(first + count, len(head)))


def fold(gradients: Tensor, signs: Tensor, width: int) -> Tensor:
    """Sums of every `width`-th column, each times its sign: a count sketch. [n, V] -> [n, width].

    Inner products of folded rows are those of the rows, in the mean over the signs, whatever
    columns fall together. With words ordered by frequency, no two frequent ones do.
    """
    signed, outputs = gradients * signs, gradients.shape[1]
    if outputs <= width:
        return signed
    whole = outputs // width * width
    folded = signed.narrow(1, 0, whole).reshape(len(signed), -1, width).sum(1)
    if whole < outputs:
        folded.narrow(1, 0, outputs - whole).add_(signed.narrow(1, whole, outputs - whole))
    return folded


def random_signs(count: int, like: Tensor) -> Tensor:
    """Signs that look random and are always the same, made on the device of `like`. [count].

    A hash of the numbers from 0 on: no generator to seed, nothing to keep, no copy from the host.
    """
    mixed = torch.arange(count, device=like.device) + 0x9E37
    for shift, factor in ((13, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return (((mixed >> 16) & 1) * 2 - 1).to(like.dtype)
