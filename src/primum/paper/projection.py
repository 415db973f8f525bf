"""The approximate projection onto the paper's feasible set: a box and an ellipsoid (Alg. 5)."""

from __future__ import annotations

import torch
from torch import Tensor


def project(weights: Tensor, metric: Tensor, reach_squared: Tensor, most: float = 2.0) -> Tensor:
    """Clip into `[0, most]`, then shrink into `w' metric w <= reach_squared` (paper, Alg. 5).

    The result is feasible. PAPER: shrinking is not the Euclidean projection onto the ellipsoid, so
    the convergence proof of Chambolle-Pock does not apply.

    Shapes: weights [B], metric [B, B], reach_squared scalar -> [B].
    """
    weights = weights.clamp(0, most)
    size = weights.dot(metric @ weights).clamp_min(torch.finfo(weights.dtype).tiny)
    return weights * (reach_squared / size.maximum(reach_squared)).sqrt()
