"""Exact solutions of the paper's problems by an interior-point method, for small models.

An oracle, not a training method: it needs per-sample gradients and cvxpy with Clarabel (the `dev`
extra). Used to test Proposition 1 and to measure how much harm can be removed at best.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from primum.paper.chambolle_pock import PaperProblem


def exact_update(
    gradients: Tensor, step: Tensor, radius: float, gain: Tensor | None = None
) -> tuple[Tensor, float]:
    """The least harmful update within the trust region, in parameter space (paper, Eq. 3).

        minimise sum(max(0, G d))  subject to  ||d - step|| <= radius ||step||

    With a `gain`, both norms are in the optimizer's own metric, `sum(x^2 / gain)`, as in `Problem`.

    Shapes: gradients [B, D], step [D], gain [D] -> [D], and the minimal harm.
    """
    cp = _cvxpy()
    rows, base = _numpy(gradients), _numpy(step)
    root = np.ones_like(base) if gain is None else np.sqrt(_numpy(gain))
    reach = radius * np.linalg.norm(base / root)
    moved = cp.Variable(len(base))  # (d - step) / sqrt(gain) / reach, in the unit ball
    harm = _least_harm(cp, rows @ base, reach * (rows * root) @ moved, [cp.norm(moved) <= 1])
    return torch.as_tensor(base + reach * root * moved.value), harm


def reduced_weights(
    gradients: Tensor, step: Tensor, radius: float, gain: Tensor | None = None
) -> tuple[Tensor, float]:
    """Eq. 3 over weights `w <= 0`, with `d = step + gain * G' w` (paper, Eq. 5). -> [B], harm."""
    cp = _cvxpy()
    rows, base = _numpy(gradients), _numpy(step)
    root = np.ones_like(base) if gain is None else np.sqrt(_numpy(gain))
    unit = radius * np.linalg.norm(base / root) / np.linalg.norm(rows * root)
    weights = cp.Variable(len(rows))  # as multiples of unit, so that values are about 1
    moved = (rows * root).T @ weights / np.linalg.norm(rows * root)
    constraints = [cp.norm(moved) <= 1, weights <= 0]
    harm = _least_harm(cp, rows @ base, unit * ((rows * root**2) @ rows.T) @ weights, constraints)
    return torch.as_tensor(unit * weights.value), harm


def exact_weights(problem: PaperProblem) -> tuple[Tensor, float]:
    """Optimal extra weights of Eq. 10 or Eq. 14, including the box. -> [B], harm."""
    cp = _cvxpy()
    gram, drift = _numpy(problem.gram), _numpy(problem.drift)
    values, vectors = np.linalg.eigh(_numpy(problem.metric))
    root = (vectors * np.sqrt(values.clip(0))).T  # metric = root' root
    reach, most = float(problem.reach_squared) ** 0.5, problem.max_extra_weight
    size = float(values.clip(0).mean()) ** 0.5  # RMS norm of a sample's gradient
    unit = min(most, reach / size if size else most) or most
    weights = cp.Variable(len(drift))  # as multiples of unit
    ball = cp.norm(unit * root @ weights / (reach or 1.0)) <= (1 if reach else 0)
    box = [weights >= 0, weights <= most / unit]
    harm = _least_harm(cp, drift, -unit * gram @ weights, [ball, *box])
    return torch.as_tensor(unit * weights.value), harm


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError("exact solutions need cvxpy: pip install cvxpy") from error
    return cvxpy


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _least_harm(cp: Any, drift: Any, change: Any, constraints: list[Any]) -> float:
    """Solve with the objective in units of the largest drift, as tolerances are absolute."""
    unit = float(np.abs(drift).max()) or 1.0
    harm = cp.sum(cp.pos(drift / unit + change / unit))
    return unit * float(cp.Problem(cp.Minimize(harm), constraints).solve(solver="CLARABEL"))
