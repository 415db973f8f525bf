"""Handwritten digits, made hard: few training samples, noisy images.

The data come with scikit-learn (1,797 real images of 8 x 8 pixels), so nothing is downloaded.
Clean, they are too easy for two ways of training to differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

CLASSES = 10
SIDE = 8
SPLIT_SEED = 20_240_229  # one split and one noise for all runs, whatever their seeds


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] of mean 0 and deviation about 1, labels [N]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@cache  # nobody writes into these tensors
def load(train_size: int = 512, noise: float = 0.5) -> Digits:
    """Digits with Gaussian noise, measured in deviations of the clean pixels.

    The same call gives the same tensors, always.
    All samples that are not for training are for testing.
    """
    if not 0 < train_size < 1797:
        raise ValueError(f"train_size must be between 1 and 1796, got {train_size}")
    from sklearn.datasets import load_digits  # takes seconds, and other data do without

    rng = np.random.default_rng(SPLIT_SEED)
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images = pixels[order].reshape(-1, SIDE, SIDE)
    clean = images[:train_size]
    images = (images - clean.mean()) / clean.std()
    images = images + noise * rng.standard_normal(images.shape)
    x = torch.from_numpy(images.astype(np.float32)).unsqueeze(1)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return Digits(x[:train_size], y[:train_size], x[train_size:], y[train_size:])
