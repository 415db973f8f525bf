"""An approximate Gram operator for many tokens and large vocabularies, by chunks of tokens.

A head with V outputs is replaced by one with k of them, k much smaller than V:

    gradients at the output   folded into k columns with random signs (a count sketch)
    gain [V, d]               a column [V] times a row [d]

so that a product with the operator costs N k d instead of N V d, for N tokens. What decides who is
harmed stays exact: the batch gradient, the step predicted from it, its length, and the drift. The
angle between a token's gradient and the step is too small to be sketched.

Two passes over chunks of tokens, and nothing of size N x V: the first sums the batch's gradient,
the second makes drift and sketch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from primum.kernel.batch import HeadBatch
from primum.kernel.builder import Builder
from primum.kernel.gram import Gram, MatrixFree, choose_form, operations, output_blocks
from primum.kernel.head import Head
from primum.kernel.problem import StepProblem
from primum.kernel.recipe import Recipe
from primum.kernel.scalars import Scalar, is_one

WIDTH = 256  # Columns that the outputs are folded into.
ENTRIES = 1 << 22  # Of a chunk of output gradients: 16 MiB in float32, or a 32nd of them all.
FEW = 1 << 30  # Operations of an exact solution below which nothing is approximated.
FLOOR = 1e-20  # Weight of an entry of the head that got no gradient, when the gain is factorised.


class Sketched(Builder):
    """Builds the problem of many tokens with an approximate operator; any other one exactly.

    Args:
        width: Columns that the outputs are folded into.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width

    def build(self, head: Head, batch: HeadBatch, recipe: Recipe) -> StepProblem:
        if not approximates(head, batch, recipe):
            return super().build(head, batch, recipe)
        return sketch(head, batch, recipe, self._width)


def approximates(head: Head, batch: HeadBatch, recipe: Recipe) -> bool:
    """Whether the operator of this pass is to be sketched: of tokens, if the recipe allows it."""
    if batch.per != "token" or batch.inputs.dim() != 2 or recipe.exact or not recipe.products:
        return False
    sides = batch.inputs.shape[1], batch.output_grads.shape[1]
    return worthwhile(len(batch.inputs), *sides, products=recipe.products, factorises=head.one_gain)


def worthwhile(tokens: int, inputs: int, outputs: int, *, products: int, factorises: bool) -> bool:
    """Whether to approximate: the exact operator costs N V d / 4 or more, and twice the sketch.

    The head itself costs 6 N V d, and drift and step 4 N V d in either form. Small problems stay
    exact. Where `factorises`, the gain is the same for all outputs.
    """
    exact = min(operations(tokens, 1, inputs, outputs, products=products, factorises=factorises))
    least = max(FEW, tokens * inputs * outputs // 4)
    sketched = min(operations(tokens, 1, inputs, WIDTH, products=products, factorises=True))
    sketched += 8 * tokens * outputs  # reading all gradients once more is memory-bound
    return outputs > WIDTH and exact > max(least, 2 * sketched)


def sketch(head: Head, batch: HeadBatch, recipe: Recipe, width: int = WIDTH) -> StepProblem:
    """The problem with a sketched operator, and exactly: drift, length of the step, lr."""
    total, squares = _batch_gradient(head, batch)
    step = _predicted(total, squares, head, batch, recipe.metric)
    signs = random_signs(len(step.step), total)
    signs = signs if step.by_output is None else signs * step.by_output.sqrt()
    drift = total.new_empty(len(batch.inputs))
    inputs = total.new_empty(len(drift), total.shape[1])
    folded = total.new_empty(len(drift), min(width, len(total)))
    first = 0
    for x, g in _chunks(head, batch):
        rows = slice(first, first + len(x))
        drift[rows] = ((g @ step.step) * x).sum(1)
        inputs[rows] = x if step.by_input is None else x * step.by_input**0.5
        folded[rows] = fold(g, signs, width)
        first = rows.stop
    if batch.unscale is not None:
        drift, folded = drift * batch.unscale, folded * batch.unscale
    gram = _form(MatrixFree(inputs, folded), len(total), recipe.products)
    drift = -drift if head.maximizes else drift
    return StepProblem(gram, drift, step.norm, step.lr, per=batch.per, approximate=True)


def _chunks(head: Head, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs, with ones for a bias, and output gradients, still scaled, of successive tokens."""
    tokens, outputs = batch.output_grads.shape
    count = max(1, max(ENTRIES, batch.output_grads.numel() // 32) // outputs)
    has_bias = "bias" in head.trained
    for first in range(0, tokens, count):
        rows = min(count, tokens - first)
        x = batch.inputs.detach().narrow(0, first, rows).to(batch.dtype)
        g = batch.output_grads.detach().narrow(0, first, rows).to(batch.dtype)
        yield pad(x, (0, 1), value=1.0) if has_bias else x, g


def _form(gram: MatrixFree, outputs: int, products: int) -> Gram:
    """A matrix where that is cheaper, and small beside the gradients that arrived."""
    tokens = len(gram.features)
    small = tokens * tokens <= max(1 << 20, tokens * outputs // 32)
    return choose_form(gram, products) if small else gram


def _batch_gradient(head: Head, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' gradients [V, d], and of their squared inputs [d]."""
    pairs = _chunks(head, batch)
    x, g = next(pairs)
    total, squares = g.t() @ x, x.square().sum(0)
    for x, g in pairs:
        torch.addmm(total, g.t(), x, out=total)  # counted by FlopCounterMode, unlike `addmm_`
        squares += x.square().sum(0)
    if batch.unscale is not None:
        total *= batch.unscale
    return total, squares


@dataclass(frozen=True)
class _Step:
    """The predicted step [V, d], and the gain as a column [V] times a row [d], None for ones."""

    step: Tensor
    by_output: Tensor | None
    by_input: Any
    norm: Tensor
    lr: Scalar


def _predicted(total: Tensor, squares: Tensor, head: Head, batch: HeadBatch, metric: str) -> _Step:
    """The step from the batch gradient and `squares` [d]; it takes the memory of `total`.

    A few outputs at a time: neither the gain nor anything else of the head's size is kept.
    """
    factors = Factors(squares, torch.linalg.vector_norm(total, torch.inf))
    by_output: list[Tensor] = []
    square = total.new_zeros(())
    gain: Any = None
    lr: Scalar = 0.0
    everything = [slice(0, len(total))]
    blocks = output_blocks(len(total), total.shape[1], total.numel() // 2)
    for rows in blocks if head.by_rows else everything:
        own = total.narrow(0, rows.start, rows.stop - rows.start)
        update = head.update(own, batch, rows if head.by_rows else None)
        square += update.norm(metric).square()
        gain, lr = update.gain, update.lr
        if isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1:
            by_output.append(factors.add(own, gain))
        own.copy_(update.step)
    if by_output:
        return _Step(total, torch.cat(by_output), factors.by_input, square.sqrt(), lr)
    return _Step(total, None, None if is_one(gain) else gain, square.sqrt(), lr)


class Factors:
    """The gain as a column times a row, from blocks of outputs.

    An output's gain is a mean over its entries, half by the squares of the batch gradient and half
    by those of the inputs. The factors of the inputs are then such that the batch gradient has its
    true length in the metric of the gain, input by input. Plain means would count the many entries
    of a large head that get hardly any gradient.

    Args:
        squares: Of the inputs, summed over tokens. [d].
        largest: Entry of the batch gradient.
    """

    def __init__(self, squares: Tensor, largest: Tensor) -> None:
        tiny = torch.finfo(squares.dtype).tiny
        self._shares = squares / squares.sum().clamp_min(tiny)
        self._above, self._below = torch.zeros_like(squares), torch.zeros_like(squares)
        self._largest = largest.clamp_min(tiny)

    def add(self, grad: Tensor, gain: Tensor) -> Tensor:
        """The gain by output, from the batch gradient of some outputs. [n, d], [n, d] -> [n]."""
        weights = (grad / self._largest).square_().add_(FLOOR)
        own_shares = weights / weights.sum(1, keepdim=True)
        means = own_shares.add_(self._shares).mul_(gain).sum(1) / 2
        self._below += means @ weights
        self._above += weights.mul_(gain).sum(0)
        return means

    @property
    def by_input(self) -> Tensor:
        """The gain by input. [d]."""
        return self._above / self._below


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
