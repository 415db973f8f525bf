"""The way "rows": every rank computes with some of the head's outputs, for the samples of all.

Gram operator, drift and squared size of the step are sums over the head's outputs, so ranks that
take some of these rows each add up to the whole, exactly:

    dense    each rank forms the matrix of its rows; one all-reduce of B * B + B + 1 numbers
    free     no matrix: one all-reduce of B numbers follows each product of the solver

Features and output gradients of all samples are gathered before. Under DistributedDataParallel any
rank may take any rows; of a sharded head (`shards.py`) it takes those it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from primum.gram import Dense, Gram, MatrixFree
from primum.pipeline import Captured, maximises
from primum.problem import Solution
from primum.ranks import Ranks, chunks, rows_of_rank
from primum.recipe import Recipe
from primum.update import Update, predict_head


class OverRows(Gram):
    """The sum of the operators of several ranks, each of some outputs and of all samples."""

    collective = True

    def __init__(self, own: Gram, ranks: Ranks, diagonal: Tensor) -> None:
        self._own, self._ranks, self.diagonal = own, ranks, diagonal

    def times(self, vector: Tensor) -> Tensor:
        return self._ranks.sum(self._own.times(vector))


@dataclass(frozen=True)
class Part:
    """The outputs of a head that this rank computes with.

    Attributes:
        head: The layer, or a stand-in that has the rows of this rank alone.
        owners: The optimizers of its trained parameters, or stand-ins.
        outputs: Of the whole head.
        ranks: Those that share these.
        whole: Whether `head` and `owners` have the rows of all ranks.
    """

    head: Any
    owners: Mapping[str, Optimizer]
    outputs: int
    ranks: Ranks
    whole: bool

    @property
    def counts(self) -> list[int]:
        return chunks(self.outputs, self.ranks.size)

    @property
    def rows(self) -> slice:
        return rows_of_rank(self.counts, self.ranks.rank)

    def update(self, grad: Tensor, captured: Captured) -> Update:
        """The predicted update of these rows. [rows, d]."""
        total = grad if captured.accumulated is None else grad + captured.accumulated
        rows = self.rows if self.whole else None
        return predict_head(self.head, self.owners, total, factor=captured.factor, rows=rows)

    def everywhere(self, update: Update) -> Update:
        """The update of the whole head, on every rank: two matrices of its size travel."""
        step, gain = self.ranks.gather(update.step, self.counts), update.gain
        if isinstance(gain, Tensor) and gain.dim() == 2:
            gain = self.ranks.gather(gain.expand_as(update.step), self.counts)
        return Update(step, gain, update.lr)


def weigh_rows(
    part: Part, everyone: Captured, recipe: Recipe, *, dense: bool
) -> tuple[Tensor, Solution]:
    """Drift and solution of the problem of all samples, the same on every rank.

    Args:
        part: The rows of this rank.
        everyone: What all ranks have captured; `accumulated` is that of these rows.
        recipe: If it needs the factors of the operator, step and gain of the whole head are
            gathered.
        dense: Whether to form the matrix.
    """
    with part.ranks.waited_for():
        x, g = everyone.inputs(part.owners), everyone.outputs(part.rows)
        update = part.update(g.flatten(0, -2).t() @ x.flatten(0, -2), everyone)
        sign = -1.0 if maximises(part.head, part.owners) else 1.0
        own = MatrixFree(x, sign * g, update.gain, has_bias="bias" in part.owners)
        square = update.size(recipe.metric).square().view(1)
        sums = [own.along(update.step), square]
        solves = getattr(recipe, "radius", None) != 0
        if dense:
            sums.append(own.dense().matrix.flatten())
        elif solves and recipe.products:
            sums.append(own.diagonal)
        drift, square, rest = _split(part.ranks.sum(torch.cat(sums)), len(x))
        size = square.sqrt().squeeze(0)
        gram: Gram
        if dense:
            gram = Dense(rest.view(len(x), len(x)))
        elif solves and not recipe.products:
            update = part.everywhere(update)
            g = sign * everyone.outputs()
            gram = MatrixFree(x, g, update.gain, has_bias="bias" in part.owners)
        else:
            gram = OverRows(own, part.ranks, rest)
    # Unless products are sums over ranks, an error is this rank's own from here on.
    with part.ranks.waited_for() if gram.collective else nullcontext():
        return drift, recipe(gram, drift, size, update.lr)


def _split(total: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    return total[:count], total[count : count + 1], total[count + 1 :]
