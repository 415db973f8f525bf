"""Random erasing (Zhong et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.augment.crops import random_boxes

AREA, ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of a box


def random_erase(images: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    """Fill a random box with noise in some images, which must have mean 0 and deviation 1.

    Noise is drawn per pixel, as in the ConvNeXt recipe. Shapes: [B, C, H, W] -> the same.
    """
    count, _, height, width = images.shape
    hit = torch.rand(count, generator=generator) < chance
    sizes = torch.tensor([[height, width]]).expand(count, 2)
    top, left, tall, wide = (
        random_boxes(sizes, generator, area=AREA, aspect=ASPECT).view(count, 4, 1, 1).unbind(1)
    )
    noise = torch.randn(images.shape, generator=generator)
    row, column = torch.arange(height).view(1, -1, 1), torch.arange(width).view(1, 1, -1)
    inside = (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)
    inside = (inside & hit.view(-1, 1, 1)).unsqueeze(1)
    return torch.where(inside, noise, images)
