"""Shear, translation and rotation by resampling.

Each takes images, uint8 [B, C, H, W], and one amount per image, float [B]. Pixels outside the image
are grey (128). Interpolation is bilinear; the original recipes mix nearest, bilinear and bicubic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FILL = 128


def shear_x(images: Tensor, amount: Tensor) -> Tensor:
    """Shift rows by `amount` pixels per row."""
    return _warp(images, [[1.0, amount, 0.0], [0.0, 1.0, 0.0]])


def shear_y(images: Tensor, amount: Tensor) -> Tensor:
    """Shift columns by `amount` pixels per column."""
    return _warp(images, [[1.0, 0.0, 0.0], [amount, 1.0, 0.0]])


def translate_x(images: Tensor, amount: Tensor) -> Tensor:
    """Shift left by `amount` image widths."""
    return _warp(images, [[1.0, 0.0, amount * images.shape[3]], [0.0, 1.0, 0.0]])


def translate_y(images: Tensor, amount: Tensor) -> Tensor:
    """Shift up by `amount` image heights."""
    return _warp(images, [[1.0, 0.0, 0.0], [0.0, 1.0, amount * images.shape[2]]])


def rotate(images: Tensor, amount: Tensor) -> Tensor:
    """Rotate about the centre by `amount` degrees, counter-clockwise."""
    angle = amount * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _warp(images, [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])


def _warp(images: Tensor, rows: list[list[float | Tensor]]) -> Tensor:
    """Sample output pixel (x, y) at `rows @ (x, y, 1)`, in pixels, with the corner at 0.

    Each entry is one number, or one per image.
    """
    count, _, height, width = images.shape
    first = images.new_zeros(count, dtype=torch.float32)
    matrix = torch.stack(
        [torch.stack([first + each for each in row], dim=1) for row in rows], dim=1
    )
    x = torch.arange(width) + 0.5
    y = torch.arange(height) + 0.5
    grid = torch.stack([*torch.meshgrid(x, y, indexing="xy"), torch.ones(height, width)], dim=-1)
    source = torch.einsum("bij,hwj->bhwi", matrix, grid)  # [B, H, W, (x, y)]
    size = torch.tensor([width, height])
    inside = ((source >= 0) & (source < size)).all(dim=-1)
    sampled = F.grid_sample(
        images.float(), 2 * source / size - 1, padding_mode="border", align_corners=False
    )
    filled = torch.where(inside[:, None], sampled.round(), FILL)
    return filled.clamp(0, 255).to(torch.uint8)
