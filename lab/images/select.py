"""Subsets, label noise, mean and deviation."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.images.sources import DataError


def subset(labels: Tensor, size: int | None, classes: int, *, balanced: bool, part: str) -> Tensor:
    """Rows to keep, in their original order: all, the first `size`, or equally many of each class.

    If `size` is not a multiple of `classes`, the first classes have one more.
    Shapes: labels [N] -> [size].
    """
    if size is None:
        return torch.arange(len(labels))
    if size > len(labels):
        raise DataError(f"{part}_size is {size}, but there are {len(labels)} {part} images")
    if not balanced:
        return torch.arange(size)
    kept = []
    for label in range(classes):
        wanted = size // classes + (label < size % classes)
        rows = (labels == label).nonzero().flatten()
        if len(rows) < wanted:
            raise DataError(
                f"{part}_size={size} with balanced=True needs {wanted} images of class {label}, "
                f"but there are {len(rows)}"
            )
        kept.append(rows[:wanted])
    return torch.cat(kept).sort().values


def add_label_noise(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """The labels, a share of them replaced by any other class, with equal probability. [N]."""
    generator = torch.Generator().manual_seed(seed)
    count = round(share * len(labels))
    rows = torch.randperm(len(labels), generator=generator)[:count]
    shifts = torch.randint(1, classes, (count,), generator=generator)
    noisy = labels.clone()
    noisy[rows] = (labels[rows] + shifts) % classes
    return noisy


def mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel, on the scale 0 to 1; exact, from counts of byte values.

    Shapes: uint8 [N, C, H, W] -> C values each.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(dim=1):
        share = torch.bincount(channel.flatten().int(), minlength=256).double() / channel.numel()
        mean = float(share @ values)
        means.append(mean)
        # For a constant channel, a deviation of one grey level avoids division by zero.
        stds.append(max(float(share @ (values - mean) ** 2) ** 0.5, 1 / 255))
    return tuple(means), tuple(stds)
