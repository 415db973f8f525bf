"""Recipes of the controls: primum's weights, given to others, scaled, or from elsewhere.

Each is a `Recipe`, so it goes through `primum.attach` like our own: same capture, same prediction,
same report. What a report says of a control is about the weights that were really applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primum.experiments.extras import INSTALL
from primum.experiments.sweeps.arms import ArmError
from primum.gram import Gram, MatrixFree
from primum.paper import Paper, PaperSettings
from primum.problem import Evidence, Problem, Solution, plain
from primum.recipe import Metric, Primum
from primum.rules import Scalar
from primum.solve import solve

PERMUTE = 3  # what a generator is for


class Reduced:
    """Primum's own weights, with a radius that may change between steps.

    Attributes:
        radius: To be used from the next step on.
        losses: Each sample's loss in the step to come, for those who want to know. [B].
    """

    name = "primum"
    metric: Metric = "gain"

    def __init__(self, settings: Primum) -> None:
        self.radius = settings.radius
        self.losses: Tensor | None = None
        self._settings = settings
        self._calls = 0

    @property
    def products(self) -> int:
        return self._settings.products if self.radius > 0 else 0

    def __call__(self, gram: Gram, drift: Tensor, size: Tensor, lr: Scalar) -> Solution:
        self._calls += 1
        if self.radius == 0:
            return plain(drift)
        own = self._settings
        problem = Problem(gram, drift, self.radius * size, own.max_extra_weight)
        return self.finish(problem, solve(problem, own.max_iters, own.tolerance))

    def finish(self, problem: Problem, found: Solution) -> Solution:
        """What is made of the solution; here, nothing."""
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls = state["calls"]


class Permuted(Reduced):
    """The same weights in an order drawn anew for each step; [B] -> [B]."""

    name = "permuted"

    def __init__(self, settings: Primum, seed: int) -> None:
        super().__init__(settings)
        self._seed = seed

    def finish(self, problem: Problem, found: Solution) -> Solution:
        numbers = np.random.SeedSequence((self._seed, PERMUTE, self._calls))
        seed = int(numbers.generate_state(1, np.uint64)[0])
        weights = found.extra_weights
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed))
        return applied(problem, weights[order.to(weights.device)], found.iterations)


class Normalised(Reduced):
    """The same weights `1 + w`, divided by their mean: the step is bent, not lengthened."""

    name = "normalised"

    def finish(self, problem: Problem, found: Solution) -> Solution:
        weights = 1 + found.extra_weights
        return applied(problem, weights / weights.mean() - 1, found.iterations)


class ByLoss(Reduced):
    """The same weights, the largest to the sample with the largest loss, and so on down."""

    name = "loss-weighted"

    def finish(self, problem: Problem, found: Solution) -> Solution:
        if self.losses is None or len(self.losses) != len(found.extra_weights):
            raise ValueError("loss-weighted has to be told each sample's loss before the step")
        order = self.losses.argsort(descending=True, stable=True)
        ranked = found.extra_weights.sort(descending=True).values
        weights = torch.empty_like(ranked).scatter_(0, order, ranked)
        return applied(problem, weights, found.iterations)


class UpGrad:
    """UPGrad (Quinton and Rey, 2024) by TorchJD: the mean of all samples' gradients, each
    projected onto the cone of directions that harm none.

    It has no radius and does not look at the optimizer's step, only at the matrix; its metric is
    the optimizer's, as ours. As published its weights have a mean of 1 or more. It solves one
    quadratic program per sample, on the CPU: about a second per step at a batch of 128.
    """

    name = "upgrad"
    metric: Metric = "gain"
    products = 0

    def __init__(self, *, mean_one: bool) -> None:
        try:
            from torchjd.aggregation import UPGradWeighting

            self._weighting = UPGradWeighting()  # looks for its solver
        except ImportError as error:
            raise ArmError(f"upgrad needs torchjd and quadprog ({error}); {INSTALL}") from error
        self._mean_one = mean_one

    def __call__(self, gram: Gram, drift: Tensor, size: Tensor, lr: Scalar) -> Solution:
        assert isinstance(gram, MatrixFree)  # as `products` asks for
        dense = gram.dense()
        weights: Tensor = self._weighting(dense.matrix) * len(drift)
        if self._mean_one:
            weights = weights / weights.mean()
        return applied(Problem(dense, drift, drift.new_full((), torch.inf)), weights - 1, 0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class VaryingPaper(Paper):
    """The paper's recipe with a radius that may change between steps."""

    @property
    def radius(self) -> float:
        return self.settings.radius

    @radius.setter
    def radius(self, value: float) -> None:
        self.settings: PaperSettings = replace(self.settings, radius=value)


def applied(problem: Problem, weights: Tensor, iterations: int | Tensor) -> Solution:
    """An answer that no solver stands behind: the report tells what it does, without a bound."""
    product = problem.gram.times(weights)
    after = problem.drift - product
    objective = after.clamp_min(0).sum() + weights.dot(product) / (2 * problem.max_extra_weight)
    finite = objective.isfinite()
    return Solution(
        extra_weights=torch.where(finite, weights, 0.0),
        objective=torch.where(finite, objective, torch.inf),
        iterations=iterations,
        evidence=Evidence(objective.new_full((), torch.nan), after),
    )
