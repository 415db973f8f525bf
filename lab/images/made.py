"""Images without files: noisy handwritten digits, and generated patterns for quick trials."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.images.sources import DataError, DataSettings

SEED = 20_240_301
SPLIT_SEED = 20_240_229  # for the digits' split and noise
GREY, DEVIATION = 128, 32  # byte value of a standardised pixel of 0, and per unit

# Training images and labels, then test images and labels.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


@cache  # these tensors are never written to
def noisy_digits(train_size: int = 512, noise: float = 0.5) -> Parts:
    """Handwritten digits (scikit-learn's 1,797 of 8 x 8 pixels) with Gaussian noise.

    Noise and few training samples make them hard enough for training methods to differ. Split and
    noise are the same in every run; all samples not used for training are for testing.
    Shapes: float32 [N, 1, 8, 8] with mean 0 and deviation about 1, int64 [N].

    Args:
        train_size: Number of training images.
        noise: Noise in units of the standard deviation of the clean pixels.
    """
    if not 0 < train_size < 1797:
        raise DataError(f"digits: train_size must be between 1 and 1796, got {train_size}")
    from sklearn.datasets import load_digits  # slow import that other data does not need

    rng = np.random.default_rng(SPLIT_SEED)
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images = pixels[order].reshape(-1, 8, 8)
    clean = images[:train_size]
    images = (images - clean.mean()) / clean.std()
    images = images + noise * rng.standard_normal(images.shape)
    x = torch.from_numpy(images.astype(np.float32)).unsqueeze(1)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return x[:train_size], y[:train_size], x[train_size:], y[train_size:]


def digits(train_size: int) -> Parts:
    """The noisy digits as bytes in three equal channels. uint8 [N, 3, 8, 8], int64 [N]."""
    train, train_labels, test, test_labels = noisy_digits(train_size)
    train, test = (
        (GREY + DEVIATION * images).round().clamp(0, 255).to(torch.uint8).repeat(1, 3, 1, 1)
        for images in (train, test)
    )
    return train, train_labels, test, test_labels


def generated(settings: DataSettings) -> Parts:
    """Images of one smooth pattern per class, shifted, with strong noise; the same in every call.

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
    """Images and labels; an image is its class's pattern, rolled by up to an eighth, plus noise."""
    size = patterns.shape[-1]
    labels = torch.arange(count) % len(patterns)
    shifts = torch.randint(-(size // 8), size // 8 + 1, (count, 2), generator=generator)
    # Row i of a rolled image is row i - shift of the pattern; likewise for columns.
    rows = (torch.arange(size) - shifts[:, :1]) % size
    columns = (torch.arange(size) - shifts[:, 1:]) % size
    images = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    noise = 1.5 * torch.randn(count, 3, size, size, generator=generator)
    images = GREY + DEVIATION * (images.permute(0, 3, 1, 2) + noise)
    return images.round().clamp(0, 255).to(torch.uint8), labels
