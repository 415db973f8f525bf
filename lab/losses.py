"""Per-sample (images) or per-token (text) losses: cross entropy and focal loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lab.augment.mix import soft_targets

SURE = 1e-12  # least `1 - p` in the focal loss, whose power has no gradient at 0


def cross_entropies(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy. [B, classes], labels [B] or soft targets [B, classes] -> [B].

    For text: [B, T, V], [B, T] -> [B * T].
    """
    if logits.dim() == 3:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing, reduction="none")


def focal_losses(logits: Tensor, targets: Tensor, gamma: float, smoothing: float = 0.0) -> Tensor:
    """Focal loss (Lin et al., 2017): cross entropy, each term times `(1 - p) ** gamma`.

    [B, classes], labels [B] or soft targets [B, classes] -> [B]; [B, T, V], [B, T] -> [B * T].
    """
    if logits.dim() == 3:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    classes = logits.shape[1]
    if targets.dim() == 1:
        soft = soft_targets(targets, classes, smoothing)
    else:
        soft = (1 - smoothing) * targets + smoothing / classes
    logs = F.log_softmax(logits.float(), dim=1)
    return -(soft * (1 - logs.exp()).clamp_min(SURE).pow(gamma) * logs).sum(1)
