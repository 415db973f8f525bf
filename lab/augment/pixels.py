"""Pillow's colour operations on bytes, for whole batches.

Each takes images, uint8 [B, 3, H, W], and one amount per image, float [B], which some ignore.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def invert(images: Tensor, amount: Tensor) -> Tensor:
    """Negative."""
    return 255 - images


def posterize(images: Tensor, amount: Tensor) -> Tensor:
    """Keep the `amount` (rounded) highest bits of each byte."""
    step = 2 ** (8 - _each(amount).round().long().clamp(0, 8))
    return (images.long() // step * step).to(torch.uint8)


def solarize(images: Tensor, amount: Tensor) -> Tensor:
    """Invert bytes >= `amount`."""
    return torch.where(images < _each(amount), images, 255 - images)


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Brighten the darker half of the bytes by `amount` (an integer)."""
    brighter = (images.int() + _each(amount).int()).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def auto_contrast(images: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel so that its darkest byte is 0 and its brightest 255."""
    low, high = (f(images, dim=(2, 3), keepdim=True).double() for f in (torch.amin, torch.amax))
    scale = 255 / (high - low).clamp(min=1)
    # Slightly increased, so that rounding does not lose products that are integers.
    stretched = ((images - low) * scale + 1e-6).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor, amount: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = images.flatten(2).long()
    counts = flat.new_zeros(*flat.shape[:2], 256).scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255  # pixels per level, without the last byte's
    below = counts.cumsum(dim=2) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    mapped = torch.where(step > 0, table.gather(2, flat), flat)
    return mapped.to(torch.uint8).view_as(images)


def brightness(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with black: 1 changes nothing, 0 is black."""
    return _blend(torch.zeros_like(images), images, amount)


def colour(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with the grey image: 1 changes nothing, 0 is grey."""
    return _blend(_grey(images).expand_as(images), images, amount)


def contrast(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with the image's mean grey: 1 changes nothing."""
    mean = (_grey(images).double().mean(dim=(1, 2, 3)) + 0.5).floor().to(torch.uint8)
    return _blend(_each(mean).expand_as(images), images, amount)


def sharpness(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with the smoothed image: 1 changes nothing; border pixels are unchanged."""
    kernel = torch.ones(3, 3)
    kernel[1, 1] = 5
    smooth = images.clone()
    if min(images.shape[2:]) >= 3:
        weight = (kernel / 13).expand(images.shape[1], 1, 3, 3)
        inner = F.conv2d(images.float(), weight, groups=images.shape[1])
        smooth[:, :, 1:-1, 1:-1] = (inner + 0.5).clamp(0, 255).to(torch.uint8)
    return _blend(smooth, images, amount)


def _each(amount: Tensor) -> Tensor:
    return amount.view(-1, 1, 1, 1)


def _grey(images: Tensor) -> Tensor:
    """Luminance in integer arithmetic. uint8 [B, 1, H, W]."""
    red, green, blue = images.int().chunk(3, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8)


def _blend(base: Tensor, images: Tensor, amount: Tensor) -> Tensor:
    mixed = base + _each(amount) * (images.float() - base.float())
    return mixed.clamp(0, 255).to(torch.uint8)
