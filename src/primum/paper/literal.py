"""`recipe="paper"`: the paper's method as written, as the baseline for ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from primum.kernel.gram import MatrixFree
from primum.kernel.problem import Solution, StepProblem, plain
from primum.kernel.recipe import Metric, Recipe
from primum.kernel.scalars import scalar
from primum.paper.chambolle_pock import PaperProblem, chambolle_pock
from primum.paper.guards import condition_guard, spike_guard
from primum.paper.low_rank import gram_matrices
from primum.paper.skips import Skips
from primum.paper.spectrum import EXACT_UP_TO


@dataclass(frozen=True)
class PaperSettings:
    """All constants of the paper; the defaults are the paper's values.

    Attributes:
        radius: c, relative radius of the trust region.
        max_extra_weight: t, upper bound of the box.
        gain_rank: r, rank of the low-rank gain (Sec. 4.5).
        solver_iters: Iterations, including the warm-up (App. D).
        warm_up_iters: Projected-gradient steps (Alg. 6).
        tol: Mean absolute update at which the solver stops. Not given in the paper; at 1e-4 the
            solver stops in some early AdamW steps before it has removed any harm, at 1e-5 never.
        safety: The solver's step sizes are `safety / spectral norm`.
        relaxation: Extrapolation factor.
        spike_max_raise, spike_momentum: Alg. 2.
        condition_max_raise, condition_momentum: Alg. 4.
        exact_spectrum_up_to: Largest batch with exact eigenvalues.
    """

    radius: float = 0.2
    max_extra_weight: float = 2.0
    gain_rank: int = 5
    solver_iters: int = 50
    warm_up_iters: int = 10
    tol: float = 1e-5
    safety: float = 0.5
    relaxation: float = 0.9
    spike_max_raise: float = 1.25
    spike_momentum: float = 0.98
    condition_max_raise: float = 1.25
    condition_momentum: float = 0.98
    exact_spectrum_up_to: int = EXACT_UP_TO

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if not (value == value and 0 <= value < float("inf")):
                raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")
            if isinstance(field.default, int) and not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if name.endswith("max_raise") and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value!r}")
            if name.endswith("momentum") and value > 1:
                raise ValueError(f"{name} must be <= 1, got {value!r}")
        if self.max_extra_weight == 0 or self.gain_rank == 0:
            raise ValueError(
                "max_extra_weight and gain_rank must be > 0, "
                f"got {self.max_extra_weight} and {self.gain_rank}"
            )


class Paper(Recipe):
    """The paper's `Recipe`; its state is the guards' moving averages.

    Examples:
        >>> model = nn.Linear(8, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> recipe = primum.paper.Paper(primum.paper.PaperSettings(gain_rank=3))
        >>> reducer = primum.attach(model, optimizer, recipe=recipe)
    """

    name = "paper"
    metric: Metric = "euclidean"  # PAPER: the trust region is a Euclidean ball, also for AdamW
    products = 0  # needs the factors for its low-rank gain

    def __init__(self, settings: PaperSettings | None = None) -> None:
        self.settings = settings or PaperSettings()
        self._averages: dict[str, Tensor] = {}
        self._calls = 0
        self._skips: Skips | None = None

    def attached(self, scaler: Any, steps: Any) -> None:
        self._skips = Skips(self, scaler, steps)

    @property
    def radius(self) -> float:  # type: ignore[override]
        """Radius of the trust region."""
        return self.settings.radius

    @property
    def max_extra_weight(self) -> float:
        """Upper bound of the box."""
        return self.settings.max_extra_weight

    def __call__(self, problem: StepProblem) -> Solution:
        """Apply the guards and solve Eq. 10 or Eq. 14."""
        gram = problem.gram
        assert isinstance(gram, MatrixFree)  # because of `products`
        if self._skips is not None:
            self._skips.settle()
        first, second = gram_matrices(gram, self.settings.gain_rank)
        return self.solve(first, second, problem.drift, problem.step_norm.square(), problem.lr)

    def solve(
        self,
        gram: Tensor,
        metric: Tensor,
        drift: Tensor,
        step_squared: Tensor,
        lr: Tensor | float,
    ) -> Solution:
        """Extra weights from Q1, Q2, q and `||step||^2`, all per unit lr.

        The paper's quantities include the learning rate, and the spike guard compares their
        absolute size, so they are multiplied by it for the guard, then divided by it again. lr = 0,
        as at the start of a warm-up, gives zero extra weights.

        Shapes: gram, metric [B, B], drift [B].
        """
        own = self.settings
        if own.radius == 0:
            return plain(drift)
        generator = torch.Generator(drift.device).manual_seed(self._calls)
        rate = scalar(lr.squeeze()) if isinstance(lr, Tensor) else lr
        lr = (drift.new_ones(()) * rate).to(drift.dtype)
        safe_lr = torch.where(lr > 0, lr, 1.0)  # lr = 0: all zeros, so zero weights
        averages: dict[str, Tensor] = {}
        clipped, guarded_drift, averages["spike"] = spike_guard(
            step_squared * lr.square(),
            drift * lr,
            self._average("spike", drift),
            max_raise=own.spike_max_raise,
            momentum=own.spike_momentum,
        )

        def conditioned(matrix: Tensor, key: str) -> tuple[Tensor, Tensor]:
            matrix, norm, averages[key] = condition_guard(
                matrix,
                self._average(key, drift),
                generator,
                max_raise=own.condition_max_raise,
                momentum=own.condition_momentum,
                exact_up_to=own.exact_spectrum_up_to,
            )
            return matrix, norm

        guarded, norm = conditioned(gram, "condition")
        problem = PaperProblem(
            gram=guarded,
            metric=guarded if metric is gram else conditioned(metric, "condition_2")[0],
            drift=guarded_drift / safe_lr,
            reach_squared=own.radius**2 * clipped / safe_lr.square(),
            max_extra_weight=own.max_extra_weight,
        )
        weights, iterations = chambolle_pock(
            problem,
            norm,
            iterations=own.solver_iters,
            warm_up=own.warm_up_iters,
            tol=own.tol,
            safety=own.safety,
            relaxation=own.relaxation,
        )
        # The report describes the problem before the guards.
        drift_after = drift - gram @ weights
        finite = drift_after.isfinite().all()
        self._keep(averages, finite)
        return Solution(
            extra_weights=torch.where(finite, weights, 0.0),
            objective=torch.where(finite, drift_after.clamp_min(0).sum(), torch.inf),
            lower_bound=drift.new_full((), torch.nan),  # the paper's method has no certificate
            drift_after=drift_after,
            iterations=iterations,
        )

    def _average(self, key: str, like: Tensor) -> Tensor:
        return self._averages.get(key, like.new_full((), torch.nan)).to(like)

    def _keep(self, averages: Mapping[str, Tensor], finite: Tensor) -> None:
        """Update the averages, except after a step with non-finite values."""
        for key, value in averages.items():
            good = finite & value.isfinite()
            self._averages[key] = torch.where(good, value, self._average(key, value))
        self._calls += 1

    def state_dict(self) -> dict[str, Any]:
        if self._skips is not None:
            self._skips.settle()
        return self.averages()

    def averages(self) -> dict[str, Any]:
        """The state as it is, steps included that a GradScaler may have skipped."""
        return {"calls": self._calls, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._skips is not None:
            self._skips.forget()
        self.restore(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `averages` returned."""
        self._calls = state["calls"]
        self._averages = dict(state["averages"])
