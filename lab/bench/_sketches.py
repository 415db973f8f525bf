"""The library's approximation of a per-token problem, scored by the exact problem's harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.bench._capture import Moment
from primum.kernel.batch import HeadBatch
from primum.kernel.gram import Gram
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Problem
from primum.kernel.recipe import Primum
from primum.kernel.solver import solve
from primum.tokens.sketch import sketch

RADIUS, MAX_ITERS, TOLERANCE = 0.1, 12, 0.005


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
        self.radius = RADIUS * moment.update.norm("gain")
        self.harm = float(moment.drift.clamp_min(0).sum())
        best = solve(Problem(self.gram, moment.drift, self.radius), 30)
        self._best = self._removed(self.gram.times(best.extra_weights), 1.0)
        self.share = self._best / self.harm

    def _removed(self, product: Tensor, scale: float) -> float:
        after = (self.moment.drift - scale * product).clamp_min(0).sum()
        return self.harm - float(after)

    def score(self, weights: Tensor) -> Score:
        product = self.gram.times(weights)
        length = float((weights @ product).clamp_min(0).sqrt() / self.radius)
        feasible = self._removed(product, min(1.0, 1 / max(length, 1e-30)))
        return Score(self._removed(product, 1.0) / self._best, feasible / self._best, length)

    def weights(self, gram: Gram) -> Tensor:
        """Extra weights of all tokens."""
        problem = Problem(gram, self.moment.drift, self.radius)
        return solve(problem, MAX_ITERS, TOLERANCE).extra_weights


class Known:
    """A head without a bias whose update is known."""

    trained, by_rows, maximizes = ("weight",), True, False

    def __init__(self, update: Update) -> None:
        self._update = update

    def update(self, _: Tensor, batch: HeadBatch, rows: slice | None) -> Update:
        step, gain = self._update.step, self._update.gain
        some = rows or slice(None)
        if isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1:
            gain = gain[some]
        return Update(step[some], gain, self._update.lr)


def product(moment: Moment, width: int) -> Gram:
    """The library's operator."""
    batch = HeadBatch(moment.gram.features, moment.gram.output_gradients, per="token")
    head: Any = Known(moment.update)
    found = sketch(head, batch, Primum(), width)
    drift, norm = moment.drift, moment.update.norm("gain")
    torch.testing.assert_close(found.drift, drift, rtol=1e-3, atol=1e-4 * float(drift.abs().max()))
    torch.testing.assert_close(found.step_norm, norm, rtol=1e-2, atol=0)
    return found.gram
