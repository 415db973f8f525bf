"""The convex problem of one step, in batch space, and the certificate of any answer to it.

    minimise   sum(max(0, drift - gram @ w)) + (1 / 2t) w' gram w
    subject to w >= 0  and  sqrt(w' gram w) <= trust_radius

with `t = max_extra_weight`. Its dual has one multiplier in [0, 1] per sample; every point of that
cube gives a feasible `w <= t` and a lower bound on the optimum, so a solver may stop at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from primum.kernel.gram import Dense, Gram, MatrixFree
from primum.kernel.scalars import Scalar


@dataclass(frozen=True)
class StepProblem:
    """What a recipe solves: how the coming step changes the samples' losses, per unit lr.

    Attributes:
        gram: The operator `G diag(gain) G^T` over the samples. [B, B].
        drift: First-order change of each sample's loss under the plain step. [B].
        step_norm: Length of that step, in the recipe's metric.
        lr: Learning rate of the step.
        per: What a row is: "sample" or "token".
        approximate: Whether `gram` is an approximation; drift and step never are.
        own: The samples of this process, if others solve the same problem.
    """

    gram: Gram
    drift: Tensor
    step_norm: Tensor
    lr: Scalar
    per: str = "sample"
    approximate: bool = False
    own: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Problem:
    """The convex problem of one step: which samples it harms, and how far it may be changed.

    Args:
        gram: The operator `G diag(gain) G^T`, see `primum.kernel.gram.Gram`. [B, B].
        drift: First-order change of each sample's loss per unit lr under the plain step. [B].
        trust_radius: Radius of the trust region, in the optimizer's own metric. Scalar tensor.
        max_extra_weight: No sample gets more extra weight than this.

    Examples:
        >>> gram = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
        >>> problem = Problem.dense(gram, drift=torch.tensor([0.3, -0.6]), trust_radius=0.2)
        >>> solve(problem).extra_weights
        tensor([0.2000, 0.0000])
    """

    gram: Gram
    drift: Tensor
    trust_radius: Tensor
    max_extra_weight: float = 2.0

    @classmethod
    def dense(
        cls,
        gram: Tensor,
        drift: Tensor,
        trust_radius: Tensor | float,
        max_extra_weight: float = 2.0,
    ) -> Problem:
        """Create a problem from its Gram matrix. gram [B, B], drift [B]."""
        if drift.dim() != 1 or gram.shape != (len(drift), len(drift)):
            raise ValueError(
                f"gram must be [B, B] and drift [B], got {list(gram.shape)} and {list(drift.shape)}"
            )
        return cls._checked(Dense(gram), drift, trust_radius, max_extra_weight)

    @classmethod
    def matrix_free(
        cls,
        features: Tensor,
        output_gradients: Tensor,
        gain: Tensor | float,
        drift: Tensor,
        trust_radius: Tensor | float,
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
        return cls._checked(gram, drift, trust_radius, max_extra_weight)

    def scaled(self, factor: float) -> Problem:
        """The problem of gradients times `factor`: it has the same weights."""
        return Problem(
            self.gram.scaled(factor),
            self.drift * factor**2,
            self.trust_radius * factor,
            self.max_extra_weight,
        )

    @classmethod
    def _checked(
        cls, gram: Gram, drift: Tensor, trust_radius: Tensor | float, max_extra_weight: float
    ) -> Problem:
        if not max_extra_weight > 0:
            raise ValueError(f"max_extra_weight must be > 0, got {max_extra_weight}")
        trust_radius = torch.as_tensor(trust_radius, dtype=drift.dtype, device=drift.device)
        return cls(gram, drift, trust_radius, max_extra_weight)


@dataclass(frozen=True)
class Solution:
    """Extra weights, and a certificate of how good they are.

    Attributes:
        extra_weights: `w`, between 0 and `max_extra_weight`. [B].
        objective: Value of the problem at `w`; infinite, with `w` zero, if the problem is not
            finite.
        lower_bound: Certified lower bound on the objective of all feasible points; NaN without a
            certificate.
        drift_after: Change of each sample's loss with the extra weights. [B].
        iterations: Number of solver iterations; a tensor if only the device knows it.
    """

    extra_weights: Tensor
    objective: Tensor
    lower_bound: Tensor
    drift_after: Tensor
    iterations: int | Tensor = 0


def plain(drift: Tensor) -> Solution:
    """Zero extra weights, and the harm of the plain step."""
    harm = drift.clamp_min(0).sum().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return Solution(torch.zeros_like(drift), harm, harm, drift)
