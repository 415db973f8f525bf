"""The problems of the paper as they stand, solved by an interior-point method, for small models.

An oracle, not a training method: it needs per-sample gradients and cvxpy with Clarabel (the `dev`
extra). Used to test Proposition 1 and to say how much of the harm can be removed at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primum.paper.chambolle_pock import PaperProblem


def exact_update(
    gradients: Tensor, step: Tensor, radius: float, gain: Tensor | None = None
) -> tuple[Tensor, float]:
    """The update closest to `step` in harm-free direction, in parameter space (paper, Eq. 3).

        minimise sum(max(0, G d))  subject to  ||d - step|| <= radius ||step||

    With a `gain` both norms are the optimizer's own, `sum(x^2 / gain)` (design of `Problem`).

    Shapes: gradients [B, D], step [D], gain [D] -> [D], and the smallest harm.
    """
    cp = _cvxpy()
    rows, base = _numpy(gradients), _numpy(step)
    root = 1.0 if gain is None else _numpy(gain) ** 0.5
    moved = cp.Variable(len(base))  # (d - step) / sqrt(gain), so that the ball is round
    harm = cp.sum(cp.pos((rows * root) @ moved + rows @ base))
    reach = radius * float(((base / root) ** 2).sum() ** 0.5)
    value = _solve(cp.Problem(cp.Minimize(harm), [cp.norm(moved) <= reach]))
    return torch.as_tensor(base + root * moved.value), value


def reduced_weights(
    gradients: Tensor, step: Tensor, radius: float, gain: Tensor | None = None
) -> tuple[Tensor, float]:
    """The same problem over `w <= 0` with `d = step + gain * G' w` (paper, Eq. 5). -> [B], harm."""
    cp = _cvxpy()
    root = torch.ones_like(step) if gain is None else gain.sqrt()
    scaled, drift = _numpy(gradients * root), _numpy(gradients @ step)
    reach = radius * float((step / root).norm())
    weights = cp.Variable(len(drift))
    moved = scaled.T @ weights
    harm = cp.sum(cp.pos(scaled @ moved + drift))
    constraints = [cp.norm(moved) <= reach, weights <= 0]
    value = _solve(cp.Problem(cp.Minimize(harm), constraints))
    return torch.as_tensor(weights.value), value


def exact_weights(problem: PaperProblem) -> tuple[Tensor, float]:
    """The optimum of Eq. 10 or Eq. 14, box and all. -> [B], harm."""
    cp = _cvxpy()
    gram, drift = _numpy(problem.gram), _numpy(problem.drift)
    values, vectors = torch.linalg.eigh(problem.metric.double())
    root = _numpy(vectors * values.clamp_min(0).sqrt()).T  # metric = root' root
    weights = cp.Variable(len(drift))
    reach = float(problem.reach_squared) ** 0.5
    constraints = [
        cp.norm(root @ weights) <= reach,
        weights >= 0,
        weights <= problem.max_extra_weight,
    ]
    value = _solve(cp.Problem(cp.Minimize(cp.sum(cp.pos(drift - gram @ weights))), constraints))
    return torch.as_tensor(weights.value), value


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError("exact solutions need cvxpy: pip install 'primum[dev]'") from error
    return cvxpy


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _solve(problem: Any) -> float:
    return float(problem.solve(solver="CLARABEL"))
