"""Random crop, flip, resized crop, centre crop."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crop(
    images: Tensor, padding: int, generator: torch.Generator, *, reflect: bool = False
) -> Tensor:
    """Random crops of the original size from images padded on all sides.

    Padding is zero, or the image reflected at its edge. Shapes: [B, C, H, W] -> the same.
    """
    count, _, height, width = images.shape
    padded = reflected(images, padding) if reflect else F.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, top, left, H, W]
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator)
    return windows[torch.arange(count), :, top, left]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each image horizontally with probability 1/2. Shapes: [B, C, H, W]."""
    return mirror(images, torch.rand(len(images), generator=generator) < 0.5)


def mirror(images: Tensor, chosen: Tensor) -> Tensor:
    """Flip the chosen images horizontally. Shapes: [B, C, H, W], bool [B]."""
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(3), images)


def reflected(images: Tensor, padding: int) -> Tensor:
    """Pad on all sides with the image reflected at its edge, for any dtype.

    Shapes: [B, C, H, W] -> [B, C, H + 2 padding, W + 2 padding].
    """
    rows, columns = (
        side - 1 - (side - 1 - torch.arange(-padding, side + padding).abs()).abs()
        for side in images.shape[-2:]
    )
    return images[:, :, rows[:, None], columns]


def random_boxes(
    sizes: Tensor,
    generator: torch.Generator,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Boxes of random area (a share of the image) and random aspect ratio, log-uniform.

    Uses the first of ten tries per image that fits; if none does, the centre of the image.
    Shapes: sizes [B, 2] of (height, width) -> integers [B, 4] of (top, left, height, width).
    """
    tries = 10
    draws = torch.rand(len(sizes), tries, 2, generator=generator)
    heights, widths = sizes[:, :1], sizes[:, 1:]
    areas = heights * widths * (area[0] + draws[..., 0] * (area[1] - area[0]))
    low, high = math.log(aspect[0]), math.log(aspect[1])
    ratios = torch.exp(low + draws[..., 1] * (high - low))
    tall, wide = (areas / ratios).sqrt().round().long(), (areas * ratios).sqrt().round().long()
    fits = (tall > 0) & (tall <= heights) & (wide > 0) & (wide <= widths)
    first = fits.int().argmax(dim=1, keepdim=True)
    side = sizes.min(dim=1, keepdim=True).values
    some = fits.any(dim=1, keepdim=True)
    tall = torch.where(some, tall.gather(1, first), side)
    wide = torch.where(some, wide.gather(1, first), side)
    place = torch.rand(len(sizes), 2, generator=generator)
    place = torch.where(some, place, 0.5)  # centred if no try fits
    corner = (place * (torch.cat([heights - tall, widths - wide], dim=1) + 1)).long()
    return torch.cat([corner, tall, wide], dim=1)


def resized_crop(images: Iterable[Tensor], boxes: Tensor, size: int) -> Tensor:
    """Crop each box and resize it (bicubic, antialiased when shrinking).

    One image at a time, since boxes differ in size.
    Shapes: uint8 [C, H, W] each, [B, 4] -> [B, C, size, size].
    """
    crops = []
    for image, (top, left, tall, wide) in zip(images, boxes.tolist(), strict=True):
        crop = image[None, :, top : top + tall, left : left + wide]
        crops.append(_resize(crop, (size, size)))
    return torch.cat(crops)


def centre_crop(image: Tensor, size: int) -> Tensor:
    """Resize the short side of an image to `size * 256 / 224` and crop the centre.

    Shapes: uint8 [C, H, W] -> [C, size, size].
    """
    height, width = image.shape[1:]
    scale = int(size / (224 / 256)) / min(height, width)
    resized = _resize(image[None], (round(scale * height), round(scale * width)))[0]
    top, left = (resized.shape[1] - size) // 2, (resized.shape[2] - size) // 2
    return resized[:, top : top + size, left : left + size]


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
