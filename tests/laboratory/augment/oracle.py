"""Random images, and the same images for Pillow."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor


def random_images(count: int = 4, size: int = 16, seed: int = 0) -> Tensor:
    """Images of rising contrast, the last of several constant; uint8 [B, 3, S, S]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, 3, size, size, generator=generator)
    ramp = torch.linspace(0, 1, size).expand(3, size, size)
    span = torch.linspace(0.3, 1.0, count).view(-1, 1, 1, 1)
    images = (255 * (0.1 + 0.9 * span * (0.5 * noise + 0.5 * ramp))).to(torch.uint8)
    if count > 1:
        images[-1] = 77
    return images


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def difference(first: Tensor, second: Tensor) -> int:
    """The largest difference of two bytes."""
    return int((first.int() - second.int()).abs().max())
