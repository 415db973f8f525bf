"""What a recipe is, and the default one: from a step's Gram operator and drift to extra weights."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from primum.gram import Gram
from primum.problem import Problem, Solution, plain
from primum.rules import Scalar
from primum.solve import solve
from primum.warn import warn

Metric: TypeAlias = Literal["gain", "euclidean"]


class Recipe(Protocol):
    """Computes extra weights from the Gram operator and the drift of a step.

    A recipe with an attribute `exact = False` may get an approximate operator (per token, with a
    large vocabulary).

    Attributes:
        name: For `state_dict` and reports.
        metric: How the `size` of the step is measured: in the optimizer's own metric,
            `sqrt(sum(step^2 / gain))`, or as `sqrt(sum(step^2))`.
        products: Number of Gram products per step, for the cost model. 0 if there are none, or if
            it needs the factors of the operator: then it gets a `MatrixFree` of all samples.
    """

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def products(self) -> int: ...

    def __call__(self, gram: Gram, drift: Tensor, size: Tensor, lr: Scalar) -> Solution:
        """Extra weights of the samples. drift [B], size and lr scalars."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Primum:
    """The default recipe: the problem in the optimizer's own metric, solved with a certificate.

    Its arguments are those of `primum.attach`.
    """

    radius: float = 0.4
    max_extra_weight: float = 2.0
    max_iters: int = 12
    tolerance: float = 0.005
    compile: bool = False
    exact: bool = False
    name: str = "primum"
    metric: Metric = "gain"
    _compiled: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("radius", self.radius, "a number", numbers.Real, 0)
        _check_number("max_extra_weight", self.max_extra_weight, "a number", numbers.Real, 0)
        _check_number("max_iters", self.max_iters, "a whole number", numbers.Integral, 1)
        _check_number("tolerance", self.tolerance, "a number", numbers.Real, 0)
        if self.max_extra_weight == 0:
            raise ValueError("max_extra_weight must be > 0, got 0; for plain training use radius=0")

    @property
    def products(self) -> int:
        return self.max_iters + 1 if self.radius > 0 else 0

    def __call__(self, gram: Gram, drift: Tensor, size: Tensor, lr: Scalar) -> Solution:
        if self.radius == 0:  # nothing to solve: plain training, measured
            return plain(drift)
        problem = Problem(gram, drift, self.radius * size, self.max_extra_weight)
        # Static shapes, of the first batch alone: a short last batch is not worth a graph.
        compiled = self.compile and not gram.collective
        if compiled and self._compiled.setdefault("shape", drift.shape) == drift.shape:
            found = self._solve_compiled(problem)
            if found is not None:
                return found
        return solve(problem, self.max_iters, self.tolerance)

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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _check_number(name: str, value: Any, what: str, kind: type, least: int) -> None:
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right:
        raise TypeError(f"{name} must be {what}, got {value!r}")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be >= {least} and finite, got {value!r}")
