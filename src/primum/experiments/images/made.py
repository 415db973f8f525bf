"""Images that need no files: the demo's digits, and generated patterns for quick trials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from primum.experiments.images.settings import DataError, DataSettings

SEED = 20_240_301
GREY, DEVIATION = 128, 32  # a standardised pixel of 0, and of 1 more, as a byte

# Training images and labels, then test images and labels.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def digits(train_size: int) -> Parts:
    """The demo's noisy digits, its split and its noise, as bytes in three equal channels.

    Shapes: uint8 [N, 3, 8, 8], int64 [N].
    """
    if not 0 < train_size < 1797:
        raise DataError(f"digits: train_size must be between 1 and 1796, got {train_size}")
    from primum.experiments import data  # scikit-learn, which takes seconds to import

    loaded = data.load(train_size)
    train, test = (
        (GREY + DEVIATION * images).round().clamp(0, 255).to(torch.uint8).repeat(1, 3, 1, 1)
        for images in (loaded.train_images, loaded.test_images)
    )
    return train, loaded.train_labels, test, loaded.test_labels


def generated(settings: DataSettings) -> Parts:
    """One smooth pattern per class, shifted and drowned in noise; the same on every call.

    Shapes: uint8 [N, 3, S, S], int64 [N].
    """
    size, classes = settings.image_size or 32, settings.classes or 10
    generator = torch.Generator().manual_seed(SEED)
    coarse = torch.randn(classes, 3, 4, 4, generator=generator)
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    train = _draw(patterns, settings.train_size or 512, torch.Generator().manual_seed(SEED + 1))
    test = _draw(patterns, settings.test_size or 256, torch.Generator().manual_seed(SEED + 2))
    return *train, *test


def _draw(patterns: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels in turn; each image is its class's pattern, rolled by up to an eighth, plus noise."""
    size = patterns.shape[-1]
    labels = torch.arange(count) % len(patterns)
    shifts = torch.randint(-(size // 8), size // 8 + 1, (count, 2), generator=generator)
    # Row i of a rolled image is row i - shift of the pattern, and so for columns.
    rows = (torch.arange(size) - shifts[:, :1]) % size
    columns = (torch.arange(size) - shifts[:, 1:]) % size
    images = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    noise = 1.5 * torch.randn(count, 3, size, size, generator=generator)
    images = GREY + DEVIATION * (images.permute(0, 3, 1, 2) + noise)
    return images.round().clamp(0, 255).to(torch.uint8), labels
