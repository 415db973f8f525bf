"""How well the last layers approximate the whole network (paper, Figure 1 top and App. F)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primum.diagnostics.interference import Interference


@dataclass(frozen=True, eq=False)
class Depth:
    """Approximation by the last layers. Entry l covers layers l to the last.

    Attributes:
        layers: Layer names in execution order.
        scale: The alpha that minimizes `||whole - alpha * partial||` (Frobenius) for the Gram
            matrices; 0 if the partial sum is zero. [layers].
        error: `||whole - scale * partial|| / ||whole||` (Frobenius), between 0 and 1; 0 if the
            whole matrix is zero. [layers].
    """

    layers: tuple[str, ...]
    scale: Tensor
    error: Tensor


def by_depth(interference: Interference) -> Depth:
    """Optimal scale and relative error of the Gram matrix's partial sums from the last layer back.

    For AdamW the matrices include the gain, like the paper's Q_1.
    """
    partial = interference.gram.flip(0).cumsum(0).flip(0).flatten(1)
    size = partial[0].abs().max()
    partial = partial / torch.where(size > 0, size, 1.0)  # squares of small entries would underflow
    whole = partial[0]
    own = _largest(partial)
    unit = partial / own  # likewise if the last layers are much smaller than the rest
    squared = unit.square().sum(1)
    scale = torch.where(squared > 0, unit @ whole / squared, 0.0)
    left = whole - scale.unsqueeze(1) * unit
    norm = whole.norm()
    error = torch.where(norm > 0, left.norm(dim=1) / norm, 0.0)
    return Depth(interference.layers, scale / own.squeeze(1), error)


def _largest(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)
