"""5 - The dual solver: one Gram product per iteration, and a certificate at every iterate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primum.problem import Problem, Solution, recover
from primum.rules import on_host


def solve(problem: Problem, max_iters: int = 20, tolerance: float = 0.0) -> Solution:
    """Solve for extra weights by spectral projected gradient ascent on the dual multipliers.

    The gradient of the dual at gamma is `drift - gram @ w` with `w = min(t, reach / n) gamma`, so
    the one product an iteration needs is also all that its certificate needs. Steps are scaled by
    the inverse of the Gram diagonal: the samples' gradient norms differ by orders of magnitude.
    Starts from the harmed samples' indicator; the best of all points visited, zero among them, is
    returned, so the answer is never worse than leaving the step alone.

    DEPARTS: step lengths are Barzilai and Borwein's, the inverse curvature along the last move. The
    curvature that counts is that among the few samples at risk, often a tenth of the largest
    eigenvalue that accelerated methods step by: after 20 iterations the mean gap was a tenth, too.

    Args:
        problem: See `Problem`.
        max_iters: Most iterations. On an accelerator, in a compiled graph and over several ranks,
            the exact number: nothing waits for a device to decide on stopping.
        tolerance: Stop at this certified gap, relative to the harm of the plain step.

    Returns:
        A feasible `Solution` with its lower bound.
    """
    if max_iters < 1:
        raise ValueError(f"max_iters must be >= 1, got {max_iters}")
    gram, drift, most = problem.gram, problem.drift, problem.max_extra_weight
    stops = gram.over_ranks is None and on_host(drift) and not torch.compiler.is_compiling()
    number: Any = Tensor.tolist if stops else _same  # `tolist` reads host memory: not a sync
    larger: Any = max if stops else torch.maximum
    inverse = gram.diagonal.clamp_min(torch.finfo(drift.dtype).tiny).reciprocal()
    pull = drift / problem.reach
    reach = number(problem.reach)
    floor = (reach / most) ** 2

    zero = torch.zeros_like(drift)
    point = (drift > 0).to(drift.dtype)
    product = gram.times(point)
    points, products = [zero, point], [zero, product]
    square, extent = map(number, gram.totals(point.dot(gram.diagonal), point.dot(product)))
    harm = best = bound = 0.0
    if stops:
        harm = best = number(point.dot(drift))
        if not (extent > 0 and 0 < reach < torch.inf):  # nobody is harmed, or not finite
            max_iters = 0
    length = 0.5 * square / extent if max_iters else 0.0  # at first with caution
    for _ in range(max_iters):
        size = larger(extent, floor) ** 0.5
        descent = product - pull * size
        if stops:
            norm = extent**0.5
            used = min(most * norm, reach)
            half = used * used / (2 * most)
            best = min(best, half - reach / size * number(descent.clamp_max(0).sum()))
            bound = max(bound, number(point.dot(drift)) - used * norm + half)
            if best - bound <= tolerance * harm:
                break
        moved = torch.addcmul(point, descent, inverse * length, value=-1).clamp_(0, 1)
        points.append(moved)
        products.append(gram.times(moved))
        move, change = moved - point, products[-1] - product
        point, product = moved, products[-1]
        square, curvature, extent = map(
            number,
            gram.totals(move.dot(move * gram.diagonal), move.dot(change), point.dot(product)),
        )
        if stops and not (curvature > 0 and extent > 0):
            break
        length = square / curvature  # NaN on a device once nothing moves; see `recover`
    return recover(torch.stack(points), torch.stack(products), problem, len(points) - 2)


def _same(tensor: Tensor) -> Tensor:
    return tensor
