"""How well the last layers stand for the whole network (paper, Figure 1 top and App. F)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primum.diagnostics.interference import Interference


@dataclass(frozen=True, eq=False)
class Depth:
    """Entry l is about layers l to the last: the last entry about the last layer alone.

    Attributes:
        layers: Names, from the first layer to run to the last.
        scale: The alpha that brings `alpha * partial` closest to the whole Gram matrix; 0 where
            the partial sum is zero. [layers].
        error: `||whole - scale * partial|| / ||whole||` (Frobenius), between 0 and 1; 0 where the
            whole is zero. [layers].
    """

    layers: tuple[str, ...]
    scale: Tensor
    error: Tensor


def by_depth(interference: Interference) -> Depth:
    """Optimal scale and relative error of the Gram matrix's partial sums from the last layer back.

    For AdamW the matrices contain the gain, as the paper's Q_1 does.
    """
    partial = interference.gram.flip(0).cumsum(0).flip(0).flatten(1)
    size = partial[0].abs().max()
    partial = partial / torch.where(size > 0, size, 1.0)  # squares of small entries would vanish
    whole = partial[0]
    own = _largest(partial)
    unit = partial / own  # likewise, where the last layers are much smaller than the rest
    squared = unit.square().sum(1)
    scale = torch.where(squared > 0, unit @ whole / squared, 0.0)
    left = whole - scale.unsqueeze(1) * unit
    norm = whole.norm()
    error = torch.where(norm > 0, left.norm(dim=1) / norm, 0.0)
    return Depth(interference.layers, scale / own.squeeze(1), error)


def _largest(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)
