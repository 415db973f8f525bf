"""4 - The convex problem of one step, in batch space, and the certificate of any answer to it.

    minimise   sum(max(0, drift - gram @ w)) + (1 / 2t) w' gram w
    subject to w >= 0  and  sqrt(w' gram w) <= reach

with `t = max_extra_weight`. Its dual has one multiplier in [0, 1] per sample; every point of that
cube gives a feasible `w <= t` and a lower bound on the optimum, so a solver may stop at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from primum.gram import Dense, Gram, MatrixFree


@dataclass(frozen=True)
class Problem:
    """The convex problem of one step: which samples it harms, and how far it may be changed.

    Args:
        gram: The operator `G diag(gain) G^T`, see `primum.gram.Gram`. [B, B].
        drift: First-order change of each sample's loss per unit lr under the plain step. [B].
        reach: Radius of the trust region, in the optimizer's own metric. Scalar tensor.
        max_extra_weight: No sample gets more extra weight than this.

    Examples:
        >>> gram = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
        >>> problem = Problem.dense(gram, drift=torch.tensor([0.3, -0.6]), reach=0.2)
        >>> solve(problem).extra_weights
        tensor([0.2000, 0.0000])
    """

    gram: Gram
    drift: Tensor
    reach: Tensor
    max_extra_weight: float = 2.0

    @classmethod
    def dense(
        cls, gram: Tensor, drift: Tensor, reach: Tensor | float, max_extra_weight: float = 2.0
    ) -> Problem:
        """Create a problem from its Gram matrix. gram [B, B], drift [B]."""
        if drift.dim() != 1 or gram.shape != (len(drift), len(drift)):
            raise ValueError(
                f"gram must be [B, B] and drift [B], got {list(gram.shape)} and {list(drift.shape)}"
            )
        return cls._checked(Dense(gram), drift, reach, max_extra_weight)

    @classmethod
    def matrix_free(
        cls,
        features: Tensor,
        output_gradients: Tensor,
        gain: Tensor | float,
        drift: Tensor,
        reach: Tensor | float,
        max_extra_weight: float = 2.0,
    ) -> Problem:
        """Create a problem whose Gram matrix is never formed.

        Shapes: features [B, d] or [B, T, d] (a column of ones stands for a bias),
        output_gradients [B, d_out] or [B, T, d_out], gain a number or [d_out, d], drift [B].
        """
        if features.shape[:-1] != output_gradients.shape[:-1] or features.dim() not in (2, 3):
            raise ValueError(
                "features [B, d] or [B, T, d] and output_gradients must agree in all but the last "
                f"dimension, got {list(features.shape)} and {list(output_gradients.shape)}"
            )
        if drift.shape != features.shape[:1]:
            raise ValueError(
                f"drift must be [B], got {list(drift.shape)} for {len(features)} samples"
            )
        size = [output_gradients.shape[-1], features.shape[-1]]
        if isinstance(gain, Tensor) and list(gain.shape) not in ([], size):
            raise ValueError(f"gain must be a number or {size}, got {list(gain.shape)}")
        gram = MatrixFree(features, output_gradients, gain)
        return cls._checked(gram, drift, reach, max_extra_weight)

    @classmethod
    def _checked(
        cls, gram: Gram, drift: Tensor, reach: Tensor | float, max_extra_weight: float
    ) -> Problem:
        if not max_extra_weight > 0:
            raise ValueError(f"max_extra_weight must be > 0, got {max_extra_weight}")
        reach = torch.as_tensor(reach, dtype=drift.dtype, device=drift.device)
        return cls(gram, drift, reach, max_extra_weight)


@dataclass(frozen=True)
class Evidence:
    """How good an answer is. Shapes: lower_bound scalar, drift_after [B]."""

    lower_bound: Tensor
    drift_after: Tensor


@dataclass(frozen=True)
class Visited:
    """`Evidence` that is computed when read, from the dual points a solver visited.

    A report may be kept, so this does not hold the problem: its Gram operator is large.

    Shapes: drift [B]; multipliers, after [k, B]; norm, used [k]; best scalar.
    """

    drift: Tensor
    max_extra_weight: float
    multipliers: Tensor
    norm: Tensor
    used: Tensor
    after: Tensor
    best: Tensor
    pulls: Tensor | None = None  # `drift' gamma`, if it is a sum over ranks. [k]

    @property
    def lower_bound(self) -> Tensor:
        """The largest of `drift' gamma - phi(n)` over the points."""
        pulls = self.multipliers @ self.drift if self.pulls is None else self.pulls
        bounds = pulls.addcmul(self.used, self.norm, value=-1)
        bounds = bounds.addcmul(self.used, self.used, value=0.5 / self.max_extra_weight)
        return bounds.nan_to_num(nan=-torch.inf).max()

    @property
    def drift_after(self) -> Tensor:
        return embedding(self.best, self.after)


@dataclass(frozen=True)
class Solution:
    """Extra weights, and a certificate of how good they are.

    Attributes:
        extra_weights: `w`, between 0 and `max_extra_weight`. [B].
        objective: Value of the problem at `w`; infinite, with `w` zero, if the problem is not
            finite.
        iterations: Number of solver iterations; a tensor if only the device knows it.
        evidence: What `lower_bound` and `drift_after` come from.
        approximate: Whether an approximate problem was solved, as the exact Gram operator was too
            expensive; the rest then refers to that one.
    """

    extra_weights: Tensor
    objective: Tensor
    iterations: int | Tensor
    evidence: Evidence | Visited
    approximate: bool = False

    @property
    def lower_bound(self) -> Tensor:
        """Certified lower bound on the objective of all feasible points."""
        return self.evidence.lower_bound

    @property
    def drift_after(self) -> Tensor:
        """`drift - gram @ w`: each sample's loss change per unit lr with `w`. [B]."""
        return self.evidence.drift_after


def plain(drift: Tensor) -> Solution:
    """Zero extra weights, and the harm of the plain step."""
    harm = drift.clamp_min(0).sum().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return Solution(torch.zeros_like(drift), harm, 0, Evidence(harm, drift))


def rounding_of(problem: Problem) -> tuple[float, float]:
    """Relative errors that rounding may cause, in `gamma' gram gamma` and in the harm.

    The first is relative to `sum(diagonal * gamma)`, which is at least `sum(diagonal * gamma^2)`.
    The second is relative to the harm and to `sqrt(trace * sum(diagonal * gamma))` times the scale
    of the weights: `|gram w|_i <= |G_i| sum_j |G_j| w_j`, summed over i.
    """
    count = problem.gram.samples or len(problem.drift)
    eps = torch.finfo(problem.drift.dtype).eps
    return 4 * eps * count, 8 * eps * count


def recover(multipliers: Tensor, products: Tensor, problem: Problem, iterations: int) -> Solution:
    """The best of several dual points, turned into extra weights with a certificate.

    With `n = sqrt(gamma' gram gamma)`, `w = min(t, reach / n) gamma` is feasible for any gamma in
    the unit cube, and `drift' gamma - phi(n)` bounds the optimum from below (weak duality); `phi`
    is written in terms of `used = min(t n, reach)`, the part of the reach that w uses.

    Rounding errors of the products count against the weights, twice. A bound on them is added to
    n, so that w stays feasible and the bound a bound. And zero weights win where the gain is
    smaller than the error of `gram @ w`, as in float32 where gradients cancel.

    Shapes: multipliers [k, B], the first one zero, and products [k, B] with
    `products[j] = gram @ multipliers[j]`.
    """
    gram, drift, most = problem.gram, problem.drift, problem.max_extra_weight
    rounding, error = rounding_of(problem)
    squares, lengths = gram.totals((multipliers * products).sum(1), multipliers @ gram.diagonal)
    (trace,) = gram.totals(gram.diagonal.sum())
    norm = (squares + rounding * lengths).clamp_min(torch.finfo(drift.dtype).tiny).sqrt()
    scale = (problem.reach / norm).clamp_max(most)
    used = scale * norm
    rows = scale.unsqueeze(1)
    after = torch.addcmul(drift, products, rows, value=-1)
    pulls, harms = None, after.clamp_min(0).sum(1)
    if gram.over_ranks is not None:  # here and not when read: a collective needs all ranks
        pulls, harms = gram.totals(multipliers @ drift, harms)
    objectives = harms.addcmul(used, used, value=0.5 / most)
    contest = objectives + error * (scale * (lengths * trace).sqrt())
    contest = torch.where(lengths > 0, contest + error * harms.select(0, 0), objectives)
    # A solver that has arrived may run into 0 / 0: points that are not numbers do not count.
    best = contest.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()
    objective = embedding(best, objectives.unsqueeze(1)).squeeze(0)
    # `embedding` is a row look-up that takes a scalar tensor; indexing by one would sync.
    return Solution(
        extra_weights=embedding(best, multipliers * rows).nan_to_num(nan=0.0),
        objective=objective.nan_to_num(nan=torch.inf, posinf=torch.inf),
        iterations=iterations,
        evidence=Visited(drift, most, multipliers, norm, used, after, best, pulls),
    )
