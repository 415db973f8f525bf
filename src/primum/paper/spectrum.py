"""Largest and smallest eigenvalue of a Gram matrix: exact, or by Lanczos (Alg. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_UP_TO = 256


def lanczos_iterations(batch: int) -> int:
    """`min(max(20, floor(B / 32)), 128)` (paper, App. C.2)."""
    return min(max(20, batch // 32), 128)


def extremal_eigenvalues(
    matrix: Tensor, generator: torch.Generator, exact_up_to: int = EXACT_UP_TO
) -> tuple[Tensor, Tensor]:
    """Smallest and largest eigenvalue; the smallest is at least `eps` times the largest.

    DEPARTS: the paper divides by the smallest, which may come out as 0 or negative in float32; here
    it is clamped at the resolution of the dtype. A non-finite matrix, on which LAPACK would raise
    an error, gives 0 and 0.

    Args:
        matrix: Symmetric, positive semi-definite. [B, B].
        generator: For the start vector of Lanczos, on the device of `matrix`.
        exact_up_to: Largest batch for which `eigvalsh` is used (paper, Alg. 4, line 2).
    """
    matrix = torch.where(matrix.isfinite().all(), matrix, 0.0)
    if len(matrix) > exact_up_to:
        start = torch.randn(
            len(matrix), generator=generator, dtype=matrix.dtype, device=matrix.device
        )
        matrix = lanczos(matrix, start, lanczos_iterations(len(matrix)))
    spectrum = torch.linalg.eigvalsh(matrix)  # SYNC: on a device, for its convergence flag
    largest = spectrum[-1]
    return spectrum[0].maximum(largest * torch.finfo(matrix.dtype).eps), largest


def lanczos(matrix: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The tridiagonal matrix whose extreme eigenvalues approach those of `matrix` (paper, Alg. 3).

    PAPER: no re-orthogonalisation. DEPARTS: where the Krylov space is exhausted and the norm is 0,
    it restarts from the current vector, which adds no eigenvalue out of range.

    Shapes: matrix [B, B], start [B] -> [iterations, iterations].
    """
    v, previous = start / start.norm(), torch.zeros_like(start)
    alphas, betas = [], [torch.zeros_like(start[0])]
    for _ in range(iterations):
        w = matrix @ v
        alphas.append(v.dot(w))
        w = w - alphas[-1] * v - betas[-1] * previous
        betas.append(w.norm())
        previous, v = v, torch.where(betas[-1] > 0, w / betas[-1], v)
    off_diagonal = torch.stack(betas[1:])[:-1]
    return torch.diag(torch.stack(alphas)) + off_diagonal.diag(1) + off_diagonal.diag(-1)
