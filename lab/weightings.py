"""Recipes of the arms: the controls, made from primum's weights, and UPGrad.

Each is a `Recipe` for `primum.attach`: same hooks, prediction and report as the default one. A
control's report describes the weights that were applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lab.epochs import PERMUTE, generator_of
from lab.errors import torchjd_for
from primum.kernel.gram import MatrixFree
from primum.kernel.problem import Problem, Solution, StepProblem, plain
from primum.kernel.recipe import Metric, Primum, Recipe
from primum.kernel.solver import solve


class Reduced(Recipe):
    """Weights made from primum's own.

    Attributes:
        losses: Each sample's loss in the next step, for recipes that need it. [B].
    """

    name = "primum"
    metric: Metric = "gain"

    def __init__(self, settings: Primum) -> None:
        self.radius = settings.radius
        self.losses: Tensor | None = None
        self._settings = settings
        self._calls = 0

    @property
    def products(self) -> int:  # type: ignore[override]
        return self._settings.products

    def __call__(self, step: StepProblem) -> Solution:
        self._calls += 1
        own = self._settings
        radius = own.radius_of(step.per)
        if radius == 0:
            return plain(step.drift)
        problem = Problem(step.gram, step.drift, radius * step.step_norm, own.max_extra_weight)
        return self.finish(problem, solve(problem, own.max_iters, own.tolerance))

    def finish(self, problem: Problem, found: Solution) -> Solution:
        """Change primum's solution into the weights to apply."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls = state["calls"]


class Permuted(Reduced):
    """primum's weights in a random order, different in each step. [B] -> [B]."""

    name = "permuted"

    def __init__(self, settings: Primum, seed: int) -> None:
        super().__init__(settings)
        self._seed = seed

    def finish(self, problem: Problem, found: Solution) -> Solution:
        generator = generator_of(self._seed, PERMUTE, self._calls)
        weights = found.extra_weights
        order = torch.randperm(len(weights), generator=generator)
        return applied(problem, weights[order.to(weights.device)], found.iterations)


class Normalised(Reduced):
    """primum's weights `1 + w`, divided by their mean."""

    name = "normalised"

    def finish(self, problem: Problem, found: Solution) -> Solution:
        weights = 1 + found.extra_weights
        return applied(problem, weights / weights.mean() - 1, found.iterations)


class ByLoss(Reduced):
    """primum's weights, assigned to samples in the order of their losses."""

    name = "loss-weighted"

    def finish(self, problem: Problem, found: Solution) -> Solution:
        if self.losses is None or len(self.losses) != len(found.extra_weights):
            raise ValueError("loss-weighted needs each sample's loss: set recipe.losses first")
        order = self.losses.argsort(descending=True, stable=True)
        ranked = found.extra_weights.sort(descending=True).values
        weights = torch.empty_like(ranked).scatter_(0, order, ranked)
        return applied(problem, weights, found.iterations)


class UpGrad(Recipe):
    """UPGrad (Quinton and Rey, 2024) by TorchJD: the mean of all samples' gradients, each
    projected onto the cone of directions that harm no sample.

    It has no radius and ignores the optimizer's step; like primum it uses the optimizer's metric.
    The published weights have a mean of 1 or more. Solves one quadratic program per sample on the
    CPU, about a second per step at a batch of 128.
    """

    name = "upgrad"
    metric: Metric = "gain"
    products = 0

    def __init__(self, *, mean_one: bool) -> None:
        with torchjd_for("upgrad"):
            from torchjd.aggregation import UPGradWeighting

            self._weighting = UPGradWeighting()  # imports its solver
        self._mean_one = mean_one

    def __call__(self, step: StepProblem) -> Solution:
        gram, drift = step.gram, step.drift
        assert isinstance(gram, MatrixFree)  # because of `products`
        dense = gram.dense()
        weights: Tensor = self._weighting(dense.matrix) * len(drift)
        if self._mean_one:
            weights = weights / weights.mean()
        return applied(Problem(dense, drift, drift.new_full((), torch.inf)), weights - 1, 0)


def applied(problem: Problem, weights: Tensor, iterations: int | Tensor) -> Solution:
    """A solution without a certificate: the report shows the effect of the weights, but no gap."""
    product = problem.gram.times(weights)
    after = problem.drift - product
    objective = after.clamp_min(0).sum() + weights.dot(product) / (2 * problem.max_extra_weight)
    finite = objective.isfinite()
    return Solution(
        extra_weights=torch.where(finite, weights, 0.0),
        objective=torch.where(finite, objective, torch.inf),
        lower_bound=objective.new_full((), torch.nan),
        drift_after=after,
        iterations=iterations,
    )
