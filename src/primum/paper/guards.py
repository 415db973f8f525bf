"""Guards applied before the solver: against step-size spikes (Alg. 2) and ill-conditioned Gram
matrices (Alg. 4). Both compare with a moving average."""

from __future__ import annotations

import torch
from torch import Tensor

from primum.paper.spectrum import EXACT_UP_TO, extremal_eigenvalues


def spike_guard(
    step_squared: Tensor,
    drift: Tensor,
    average: Tensor,
    *,
    max_raise: float = 1.25,
    momentum: float = 0.98,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip `||step||^2` at `max_raise` times its moving average (paper, Alg. 2).

    PAPER: `drift` is scaled by the ratio of the squared norms; a shorter step would scale it by the
    square root. The average starts 1 above the first value, which at common learning rates keeps
    the guard inactive for hundreds of steps.

    Args:
        step_squared: `||Delta theta||^2`, including the learning rate. Scalar.
        drift: `G Delta theta`, including the learning rate. [B].
        average: Returned by the previous call; NaN in the first call.

    Returns:
        step_squared and drift to use in the problem, and the new average.
    """
    average = torch.where(average.isnan(), step_squared + 1, average)
    most = max_raise * average
    clipped = step_squared.minimum(most)
    drift = torch.where(step_squared > most, drift * (most / step_squared), drift)
    return clipped, drift, momentum * average + (1 - momentum) * clipped


def condition_guard(
    matrix: Tensor,
    average: Tensor,
    generator: torch.Generator,
    *,
    max_raise: float = 1.25,
    momentum: float = 0.98,
    exact_up_to: int = EXACT_UP_TO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Increase the diagonal if the condition number exceeds its moving average (paper, Alg. 4).

    DEPARTS: the paper does not say where the average starts; here it starts at the first value.

    Returns:
        The guarded matrix, the largest eigenvalue of this matrix (the solver's spectral norm), and
        the new average.
    """
    smallest, largest = extremal_eigenvalues(matrix, generator, exact_up_to)
    condition = largest / smallest
    average = torch.where(average.isnan(), condition, average)
    most = max_raise * average
    added = torch.where(condition > most, (largest - most * smallest) / (most - 1), 0.0)
    guarded = matrix + torch.diag(added.expand(len(matrix)))
    average = momentum * average + (1 - momentum) * condition.minimum(most)
    return guarded, largest + added, average
