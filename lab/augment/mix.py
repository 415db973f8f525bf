"""Mixup (Zhang et al., 2018), CutMix (Yun et al., 2019), and soft targets.

Both mix a batch with itself in reverse order, with one share for the whole batch, as in the
ConvNeXt recipe. Batches are shuffled, so partners are random.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot targets with a share spread over all classes.

    Cross entropy with them is `F.cross_entropy(logits, labels, label_smoothing=smoothing)`.
    Shapes: [B] -> [B, classes].
    """
    hard = F.one_hot(labels, classes).float()
    return (1 - smoothing) * hard + smoothing / classes


def mixup(images: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mix each image with its partner, with weights `share` and `1 - share`; likewise the targets.

    Shapes: float [B, C, H, W], [B, classes] -> the same.
    """
    return tuple(share * each + (1 - share) * each.flip(0) for each in (images, targets))  # type: ignore[return-value]


def cutmix(
    images: Tensor, targets: Tensor, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Replace a box of about `1 - share` of the area by the partner's; mix targets by its area.

    The box is clipped at the image border; targets use the clipped area.
    Shapes: float [B, C, H, W], [B, classes] -> the same.
    """
    height, width = images.shape[2:]
    middle = torch.rand(2, generator=generator).tolist()
    half = (1 - share) ** 0.5 / 2
    (top, bottom), (left, right) = (
        (max(0, round(size * (place - half))), min(size, round(size * (place + half))))
        for size, place in zip((height, width), middle, strict=True)
    )
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, kept * targets + (1 - kept) * targets.flip(0)


def mix(
    images: Tensor,
    labels: Tensor,
    classes: int,
    generator: torch.Generator,
    *,
    mixup_alpha: float,
    cutmix_alpha: float,
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix, with equal probability if both alphas are above 0; soft targets.

    The share is drawn from Beta(alpha, alpha).
    Shapes: float [B, C, H, W], [B] -> [B, C, H, W], [B, classes].
    """
    targets = soft_targets(labels, classes)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    rng = np.random.default_rng(seed)  # torch cannot draw from a Beta with a generator
    if cutmix_alpha and (not mixup_alpha or rng.random() < 0.5):
        return cutmix(images, targets, rng.beta(cutmix_alpha, cutmix_alpha), generator)
    return mixup(images, targets, rng.beta(mixup_alpha, mixup_alpha))
