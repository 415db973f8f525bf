"""From the problem of a step to extra weights: what any recipe offers, and the default one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from primum.kernel.problem import Problem, Solution, StepProblem, plain
from primum.kernel.solver import solve
from primum.kernel.warn import warn

Metric: TypeAlias = Literal["gain", "euclidean"]

RADIUS = {"sample": 0.4, "token": 0.1}  # the default of `Primum` for each


class Recipe:
    """Computes extra weights from the problem of a step. Subclass it for a recipe of your own.

    Attributes:
        name: For `state_dict` and reports.
        metric: How the length of the step is measured: in the optimizer's own metric,
            `sqrt(sum(step^2 / gain))`, or as `sqrt(sum(step^2))`.
        products: Number of Gram products per step, for the cost model. 0 if there are none, or if
            it needs the factors of the operator: then it gets a `MatrixFree` of all samples.
        exact: Whether the operator may not be approximated (per token, with a large vocabulary).
        radius: Of the trust region, relative to the step; 0 is plain training, None if it has none.
    """

    name: str = "recipe"
    metric: Metric = "gain"
    products: int = 0
    exact: bool = True
    radius: float | None = None

    def __call__(self, problem: StepProblem) -> Solution:
        """Extra weights of the samples of a step."""
        raise NotImplementedError

    def radius_of(self, per: str) -> float | None:
        """The radius for weights per "sample" or "token"."""
        return self.radius

    def attached(self, scaler: Any, steps: Any) -> None:
        """Called by `attach`, for recipes with a state: a GradScaler may skip a step.

        `scaler` is the loop's, or None; `steps` has `steps`, a count, and `found_inf`.
        """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Primum(Recipe):
    """The default recipe: the problem in the optimizer's own metric, solved with a certificate.

    Args:
        radius: How far the step may be changed, relative to its own length. 0 is plain training.
            None: 0.4 for samples, 0.1 for tokens.
        max_extra_weight: No sample's gradient counts more than `1 + max_extra_weight` times.
        max_iters: Maximum number of solver iterations per step; on accelerators and over ranks,
            the exact number.
        tolerance: Stop within this distance of the optimum, relative to the harm, on the CPU.
        compile: Compile the solver for the shape of the first batch; useful on accelerators.
        exact: Never approximate. With weights per token and a large vocabulary, an exact solution
            costs several times as much as the head itself.

    Examples:
        >>> reducer = primum.attach(model, optimizer, recipe=primum.Primum(max_iters=50))
    """

    radius: float | None = None
    max_extra_weight: float = 2.0
    max_iters: int = 12
    tolerance: float = 0.005
    compile: bool = False
    exact: bool = False
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    name = "primum"
    metric: Metric = "gain"

    def __post_init__(self) -> None:
        if self.radius is not None:
            _check_number("radius", self.radius, "a number", numbers.Real, 0)
            if self.radius > 1:
                warn(
                    f"radius={self.radius:g} lets the weights change a step by more than its own "
                    "length; the default is 0.4 for samples and 0.1 for tokens"
                )
        _check_number("max_extra_weight", self.max_extra_weight, "a number", numbers.Real, 0)
        _check_number("max_iters", self.max_iters, "a whole number", numbers.Integral, 1)
        _check_number("tolerance", self.tolerance, "a number", numbers.Real, 0)
        if self.max_extra_weight == 0:
            raise ValueError("max_extra_weight must be > 0, got 0; for plain training use radius=0")

    @property
    def products(self) -> int:  # type: ignore[override]
        return 0 if self.radius == 0 else self.max_iters + 1

    def radius_of(self, per: str) -> float:
        return RADIUS[per] if self.radius is None else self.radius

    def __call__(self, problem: StepProblem) -> Solution:
        radius = self.radius_of(problem.per)
        if radius == 0:  # nothing to solve: plain training, measured
            return plain(problem.drift)
        convex = Problem(
            problem.gram, problem.drift, radius * problem.step_norm, self.max_extra_weight
        )
        # Static shapes, of the first batch alone: a short last batch is not worth a graph.
        shape, compiled = problem.drift.shape, self._compiled
        alone = problem.gram.all_reduce is None
        if self.compile and alone and compiled.setdefault("shape", shape) == shape:
            found = self._solve_compiled(convex)
            if found is not None:
                return found
        return solve(convex, self.max_iters, self.tolerance)

    def _solve_compiled(self, problem: Problem) -> Solution | None:
        """The solution by a compiled solver; None, after a warning, if it does not compile."""
        try:
            if "solve" not in self._compiled:
                self._compiled["solve"] = torch.compile(solve, fullgraph=True, dynamic=False)
            found: Solution = self._compiled["solve"](problem, self.max_iters)
            return found
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            self._compiled["shape"] = None  # no batch has it
            first = str(error).strip().partition("\n")[0]
            warn(
                "the solver failed to compile and runs eagerly; leave out compile=True to "
                f"silence this. {type(error).__name__}: {first}"
            )
            return None


def _check_number(name: str, value: Any, what: str, kind: type, least: int) -> None:
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right:
        raise TypeError(f"{name} must be {what}, got {value!r}")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be >= {least} and finite, got {value!r}")
