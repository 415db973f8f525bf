"""Gram matrices of a linear head by Khatri-Rao factorisation (paper, App. B).

An elementwise gain does not factorise; the paper uses its best rank-r approximation instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from primum.kernel.gram import MatrixFree


def low_rank(gain: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best rank-r approximation `left.T @ right` (paper, Sec. 4.5).

    PAPER: the approximation may have negative entries, so the Gram matrix computed from it need not
    be positive semi-definite.

    A feature that is always zero has a gain of about 1 / eps under AdamW, which leaves no digits of
    the others in a plain SVD, not even in float64 for the gain's square. So it goes through a QR
    decomposition with the columns in descending order, which keeps the digits of small ones.

    A non-finite gain, on which LAPACK would raise an error, gives zeros.

    Shapes: gain [d_out, d_in] -> [r, d_out], [r, d_in].
    """
    gain = torch.where(gain.isfinite().all(), gain, 0.0)
    order = gain.norm(dim=0).argsort(descending=True)
    q, r = torch.linalg.qr(gain.index_select(1, order))
    u, s, vh = torch.linalg.svd(r, full_matrices=False)  # SYNC: convergence flag, like eigvalsh
    right = torch.zeros_like(vh).index_copy(1, order, vh)
    return (q @ u[:, :rank] * s[:rank]).t(), right[:rank]


def weighted_gram(features: Tensor, output_gradients: Tensor, gain: Tensor, rank: int) -> Tensor:
    """`sum_k (x diag(v_k) x') * (g diag(s_k u_k) g')` (paper, Pseudocode 2). [B, B].

    In float64, see `low_rank`.

    Shapes: features [B, d_in], output_gradients [B, d_out], gain [d_out, d_in].
    """
    x, g = features.double(), output_gradients.double()
    left, right = low_rank(gain.double(), rank)
    total = x.new_zeros(len(x), len(x))
    for of_output, of_input in zip(left, right, strict=True):
        total += ((x * of_input) @ x.t()) * ((g * of_output) @ g.t())
    return total.to(features.dtype)


def gram_matrices(gram: MatrixFree, rank: int) -> tuple[Tensor, Tensor]:
    """Q1 and Q2: the Gram matrices with the gain and with its square.

    With a scalar gain the two are equal up to that factor (Eq. 10). As in the paper, the bias is
    not approximated. For heads with several positions per sample, which the paper does not cover,
    both matrices are exact.
    """
    if gram.uniform_gain:
        matrix = gram.dense().matrix
        is_one = isinstance(gram.gain, float) and gram.gain == 1.0
        return matrix, matrix if is_one else matrix * gram.gain
    assert isinstance(gram.gain, Tensor)
    if gram.factorises or gram.features.dim() == 3:
        squared = MatrixFree(gram.features, gram.output_gradients, gram.gain**2)
        return gram.dense().matrix, squared.dense().matrix
    gain = gram.gain.double()
    return _with_bias(gram, gain, rank), _with_bias(gram, gain**2, rank)


def _with_bias(gram: MatrixFree, gain: Tensor, rank: int) -> Tensor:
    x, g = gram.features, gram.output_gradients
    if not gram.has_bias:
        return weighted_gram(x, g, gain, rank)
    matrix = weighted_gram(x[:, :-1], g, gain[:, :-1], rank)
    return matrix.addmm_(g * gain[:, -1].to(g.dtype), g.t())
