"""Approximations of a per-token problem, scored by the exact problem's harm.

`product` is the library's; the others are alternatives that were tried. Each maps a captured
problem to a Gram operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _capture import Moment
from torch import Tensor

from primum.gram import Dense, Gram, MatrixFree
from primum.problem import Problem
from primum.sketch import Tokens, fold, random_signs, sketch, slices
from primum.solve import solve
from primum.update import Update

RADIUS, MAX_ITERS, TOLERANCE = 0.1, 12, 0.005
Factors = tuple[Tensor, Tensor]  # rows [N, k], features [N, d]


@dataclass(frozen=True)
class Score:
    """Quality of extra weights, measured by the exact operator.

    Attributes:
        removed: Harm they remove, relative to the exact solution.
        feasible: The same after scaling weights outside the trust region into it.
        length: Size of the change of the step, relative to the radius.
    """

    removed: float
    feasible: float
    length: float


class Judge:
    """Solves a captured problem exactly and scores other solutions. The problem must have harm.

    Attributes:
        share: Share of the plain step's harm that the exact solution removes.
    """

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        gram = moment.gram
        self.gram: Gram = gram.dense() if gram.factorises else gram
        self.reach = RADIUS * moment.update.size("gain")
        self.harm = float(moment.drift.clamp_min(0).sum())
        best = solve(Problem(self.gram, moment.drift, self.reach), 30)
        self._best = self._removed(self.gram.times(best.extra_weights), 1.0)
        self.share = self._best / self.harm

    def _removed(self, product: Tensor, scale: float) -> float:
        after = (self.moment.drift - scale * product).clamp_min(0).sum()
        return self.harm - float(after)

    def score(self, weights: Tensor) -> Score:
        product = self.gram.times(weights)
        length = float((weights @ product).clamp_min(0).sqrt() / self.reach)
        feasible = self._removed(product, min(1.0, 1 / max(length, 1e-30)))
        return Score(self._removed(product, 1.0) / self._best, feasible / self._best, length)

    def weights(self, gram: Gram, chosen: Tensor | None = None, groups: int = 1) -> Tensor:
        """Extra weights of all tokens, solved for `chosen` alone or for each group separately."""
        drift, found = self.moment.drift, torch.zeros_like(self.moment.drift)
        parts = [torch.arange(len(drift)) if chosen is None else chosen]
        if groups > 1:
            parts = [torch.arange(first, len(drift), groups) for first in range(groups)]
        for part in parts:
            own = gram if len(part) == len(drift) else _some(gram, part)
            problem = Problem(own, drift[part], self.reach / groups**0.5)
            found[part] = solve(problem, MAX_ITERS, TOLERANCE).extra_weights
        return found


def _some(gram: Gram, part: Tensor) -> Gram:
    if isinstance(gram, Dense):
        return Dense(gram.matrix[part][:, part])
    assert isinstance(gram, MatrixFree)
    return MatrixFree(gram.features[part], gram.output_gradients[part], gram.gain)


def product(moment: Moment, width: int) -> Gram:
    """The library's operator."""
    step, gain, head = moment.update.step, moment.update.gain, moment.gram

    def predict(_: Tensor, rows: slice | None) -> Update:
        some = rows or slice(None)
        whole = not isinstance(gain, Tensor) or gain.dim() < 2 or len(gain) == 1
        return Update(step[some], gain if whole else gain[some], moment.update.lr)

    chunks = slices(head.features, head.output_gradients)
    tokens = Tokens(chunks, len(moment.drift), predict, step.dtype)
    gram, drift, size, _ = sketch(tokens, metric="gain", products=13, width=width)
    torch.testing.assert_close(drift, moment.drift, rtol=1e-3, atol=1e-4 * float(drift.abs().max()))
    torch.testing.assert_close(size, moment.update.size("gain"), rtol=1e-2, atol=0)
    return gram


# --- the gain as a column times a row -------------------------------------------------------------


def scaled(moment: Moment, fit: Callable[[Tensor, Moment], tuple[Tensor, Tensor]]) -> Factors:
    """Output gradients and features, scaled by the square roots of the factorised gain."""
    gain, head = moment.update.gain, moment.gram
    if not isinstance(gain, Tensor) or gain.dim() < 2:
        return head.output_gradients, head.features * gain**0.5
    by_output, by_input = fit(gain, moment)
    return head.output_gradients * by_output.sqrt(), head.features * by_input.sqrt()


def plain_means(gain: Tensor, _: Moment) -> tuple[Tensor, Tensor]:
    return gain.mean(1) / gain.mean(), gain.mean(0)


def geometric_means(gain: Tensor, _: Moment) -> tuple[Tensor, Tensor]:
    logs = gain.log()
    return (logs.mean(1) - logs.mean()).exp(), logs.mean(0).exp()


def of_squares(gain: Tensor, _: Moment) -> tuple[Tensor, Tensor]:
    """Means of the second moment instead, as in Adafactor."""
    square = gain**-2
    return (square.mean(1) / square.mean()) ** -0.5, square.mean(0) ** -0.5


def by_features(gain: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
    """Means over inputs weighted by their squares, then a fit to the batch gradient."""
    shares = moment.gram.features.square().sum(0)
    by_output = gain @ (shares / shares.sum())
    return by_output, _by_input(gain, by_output, moment)


def alternating(gain: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
    """Fit to the squares of the batch gradient: first inputs, then outputs."""
    weights = _batch_squares(moment)
    by_input = (gain * weights).sum(0) / weights.sum(0)
    by_output = (gain * weights).sum(1) / (weights @ by_input).clamp_min(1e-38)
    return by_output, by_input


def _by_input(gain: Tensor, by_output: Tensor, moment: Moment) -> Tensor:
    weights = _batch_squares(moment)
    return (gain * weights).sum(0) / (by_output @ weights)


def _batch_squares(moment: Moment) -> Tensor:
    return (moment.gram.output_gradients.t() @ moment.gram.features).square()


# --- output gradients in fewer columns ------------------------------------------------------------


def random_matrix(rows: Tensor, width: int) -> Tensor:
    """Multiply by a matrix of random signs."""
    signs = torch.randint(0, 2, (rows.shape[1], width), generator=_generator()) * 2 - 1
    return rows @ (signs.to(rows) / width**0.5)


def count_sketch(rows: Tensor, width: int) -> Tensor:
    """Add columns with random signs into random bins."""
    bins = torch.randint(0, width, rows.shape[1:], generator=_generator())
    signed = rows * random_signs(rows.shape[1], rows)
    return rows.new_zeros(len(rows), width).index_add_(1, bins, signed)


def folded(rows: Tensor, width: int) -> Tensor:
    return fold(rows, random_signs(rows.shape[1], rows), width)


def true_norms(rows: Tensor, width: int) -> Tensor:
    """Fold, then rescale each row, so that the operator's diagonal is exact."""
    found = folded(rows, width)
    return found * (rows.norm(dim=1) / found.norm(dim=1).clamp_min(1e-30)).unsqueeze(1)


def largest_apart(rows: Tensor, width: int) -> Tensor:
    """Keep the largest columns in half of the width, fold the rest into the other half."""
    largest = rows.square().sum(0).topk(width // 2).indices
    rest = rows.index_fill(1, largest, 0.0)
    return torch.cat((rows[:, largest], folded(rest, width // 2)), 1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def operator(factors: Factors) -> Gram:
    rows, features = factors
    return MatrixFree(features, rows, 1.0).dense()
