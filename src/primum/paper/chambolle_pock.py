"""The paper's solver: Chambolle-Pock (Alg. 7) from a projected-gradient warm start (Alg. 6).

minimise sum(max(0, q - Q1 w))  subject to  w' Q2 w <= r,  0 <= w <= t         (paper, Eq. 17)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primum.paper.projection import project


@dataclass(frozen=True)
class PaperProblem:
    """Eq. 10 (with `metric is gram`) or Eq. 14.

    Shapes: gram (Q1) [B, B], metric (Q2) [B, B], drift (q) [B], reach_squared (r) scalar.
    """

    gram: Tensor
    metric: Tensor
    drift: Tensor
    reach_squared: Tensor
    max_extra_weight: float = 2.0

    def harm(self, weights: Tensor) -> Tensor:
        return (self.drift - self.gram @ weights).clamp_min(0).sum()

    def project(self, weights: Tensor) -> Tensor:
        return project(weights, self.metric, self.reach_squared, self.max_extra_weight)


def warm_start(problem: PaperProblem, step_size: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Primal and dual starting points by projected subgradient steps (paper, Alg. 6). [B], [B]."""
    weights = torch.zeros_like(problem.drift)
    if iterations == 0:
        return weights, weights
    active = (problem.drift > 0).to(problem.drift.dtype)
    for _ in range(iterations):
        weights = problem.project(weights + step_size * (problem.gram @ active))
        active = (problem.drift - problem.gram @ weights > 0).to(problem.drift.dtype)
    return weights, active


def chambolle_pock(
    problem: PaperProblem,
    spectral_norm: Tensor,
    *,
    iterations: int = 50,
    warm_up: int = 10,
    tol: float = 1e-5,
    safety: float = 0.5,
    relaxation: float = 0.9,
) -> tuple[Tensor, Tensor]:
    """Extra weights and the number of iterations that changed them (paper, Alg. 7).

    The paper leaves the loop once the mean absolute update is at most `tol`; here the weights stop
    changing from then on, which gives the same result without a device sync. As in the paper,
    `iterations` includes the warm-up. The paper does not give `tol`.

    Shapes: spectral_norm scalar -> [B], scalar.
    """
    # tau and sigma, which are equal; clamped for a matrix of zeros
    step_size = safety / spectral_norm.clamp_min(torch.finfo(spectral_norm.dtype).tiny)
    weights, dual = warm_start(problem, step_size, min(warm_up, iterations))
    extrapolated = weights
    going = torch.ones_like(step_size, dtype=torch.bool)
    made = torch.full_like(step_size, min(warm_up, iterations))
    for _ in range(iterations - warm_up):
        residual = problem.drift - problem.gram @ extrapolated
        dual = (dual + step_size * residual).clamp(0, 1)
        moved = problem.project(weights + step_size * (problem.gram @ dual))
        update = torch.where(going, moved - weights, 0.0)
        made = made + going
        weights = torch.where(going, moved, weights)
        extrapolated = weights + relaxation * update
        going = update.abs().mean() > tol  # once False, later updates are 0
    return weights, made
