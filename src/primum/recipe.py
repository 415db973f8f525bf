"""From a head about to move to extra weights: what a recipe is, and the default one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from primum.gram import Gram, Head
from primum.problem import Problem, Solution, plain
from primum.solve import solve
from primum.update import Update


class Recipe(Protocol):
    """From a head, what its optimizer is about to do and the drift, to extra weights. drift [B]."""

    @property
    def name(self) -> str: ...

    def __call__(self, head: Head, update: Update, drift: Tensor) -> Solution: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Primum:
    """The default recipe: the problem in the optimizer's own metric, solved with a certificate."""

    radius: float = 0.2
    max_extra_weight: float = 2.0
    max_iters: int = 20
    name: str = "primum"

    def __post_init__(self) -> None:
        _check_number("radius", self.radius, "a number", numbers.Real, 0)
        _check_number("max_extra_weight", self.max_extra_weight, "a number", numbers.Real, 0)
        _check_number("max_iters", self.max_iters, "a whole number", numbers.Integral, 1)
        if self.max_extra_weight == 0:
            raise ValueError("max_extra_weight must be > 0, got 0; for plain training use radius=0")

    def __call__(self, head: Head, update: Update, drift: Tensor) -> Solution:
        if self.radius == 0:  # nothing to solve: plain training, measured
            return plain(drift)
        problem = Problem.of_head(
            head,
            update.step,
            drift,
            radius=self.radius,
            max_extra_weight=self.max_extra_weight,
            products=self.max_iters + 2,
        )
        return solve(problem, self.max_iters)

    def of_gram(self, gram: Gram, drift: Tensor, size: Tensor) -> Solution:
        """The same for a given operator; `size` is the length of the step in its metric."""
        problem = Problem(gram, drift, self.radius * size, self.max_extra_weight)
        return solve(problem, self.max_iters)

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
