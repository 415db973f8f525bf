"""5 - The dual solver: a fixed number of iterations, one Gram product each, no host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from primum.gram import Gram
from primum.problem import Problem, Solution, recover

OVERSTEP = 1.5  # step length times curvature; the momentum below is stable up to 2


def solve(problem: Problem, max_iters: int = 20) -> Solution:
    """Solve for extra weights by projected ascent with momentum on the dual multipliers.

    The gradient of the dual at gamma is `drift - gram @ w` with `w = min(t, reach / n) gamma`, so
    the one product an iteration needs is also all that its certificate needs. Steps are scaled by
    the Gram diagonal: gradient norms of samples differ by orders of magnitude. Momentum is dropped
    for an iteration whenever it points downhill (adaptive restart). Starts from the harmed
    samples' indicator; the best of all points visited, zero among them, is returned, so the
    answer is never worse than leaving the step alone.

    DEPARTS: momentum is Polyak's rather than Nesterov's. Each point visited lies in the cube and
    so carries a certificate, and after 20 iterations its gap was the smaller one.

    Args:
        problem: See `Problem`.
        max_iters: Iterations, fixed: nothing waits for the device to decide on stopping.

    Returns:
        A feasible `Solution` with its lower bound.
    """
    if max_iters < 1:
        raise ValueError(f"max_iters must be >= 1, got {max_iters}")
    gram, drift, reach = problem.gram, problem.drift, problem.reach
    tiny = torch.finfo(drift.dtype).tiny
    drift_per_reach = drift / reach.clamp_min(tiny)
    floor = (reach / problem.max_extra_weight).square()
    zero = torch.zeros_like(drift)

    gamma = torch.heaviside(drift, zero)
    product = gram @ gamma
    step_size = _step_size(gram, product)
    previous = gamma
    visited, products = [zero, gamma], [zero, product]
    for iteration in range(max_iters):
        size = torch.maximum(gamma.dot(product), floor).sqrt()
        descent = torch.addcmul(product, drift_per_reach, size, value=-1)
        backward = previous - gamma
        uphill = descent.dot(backward) > 0
        previous = gamma
        gamma = gamma.addcmul(backward, uphill, value=-iteration / (iteration + 3))
        gamma = gamma.addcmul(step_size, descent, value=-OVERSTEP).clamp(0, 1)
        product = gram @ gamma
        visited.append(gamma)
        products.append(product)
    return recover(torch.stack(visited), torch.stack(products), problem, max_iters)


def _step_size(gram: Gram, product: Tensor) -> Tensor:
    """Per-sample step lengths: the inverse Gram diagonal over the curvature that is left. -> [B].

    After scaling the matrix has ones on its diagonal, so its largest eigenvalue is at least 1; it
    is estimated by the Rayleigh quotient after one power step from the starting point.
    """
    tiny = torch.finfo(product.dtype).tiny
    inverse = gram.diagonal.clamp_min(tiny).reciprocal()
    direction = product * inverse
    curvature = direction.dot(gram @ direction).clamp_min(tiny)
    return inverse * (direction.dot(product) / curvature).clamp_max(1)
