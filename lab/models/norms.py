"""The choice of normalisation in convolutional models.

Group norm processes each sample separately. Batch norm makes a sample's logits, and so its
gradient, depend on the other samples of the batch: `torch.func.vmap` does not support it in
training mode, and the Gram matrix is then an approximation (paper, Sec. 5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

Norm = Literal["group", "batch"]


def norm_layer(norm: Norm, groups: int) -> Callable[[int], nn.Module]:
    """A function from a number of channels to a layer with one scale and shift per channel."""
    if norm == "batch":
        return nn.BatchNorm2d
    return lambda channels: nn.GroupNorm(groups, channels)


def init_convolutions(model: nn.Module) -> None:
    """He's normal initialisation, which preserves the variance of gradients through ReLU layers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
