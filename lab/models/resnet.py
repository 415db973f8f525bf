"""Residual networks (He et al., 2016): ResNet-20 and ResNet-44 for CIFAR, ResNet-50.

The paper replaces batch norm by group norm with 8 groups in the CIFAR models (paper, App. E). It
does not give the number of groups in its ResNet-50; 32 is that of the group-norm article.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from lab.models.norms import Norm, init_convolutions, norm_layer

Stem = Literal["imagenet", "small"]


class CifarResNet(nn.Module):
    """A convolution, three stages of `blocks` basic blocks with 16, 32 and 64 channels, head.

    Depth 6 * blocks + 2. Where the image halves, the shortcut is subsampled and padded with zero
    channels (option A of the article, its choice for CIFAR).
    """

    def __init__(self, classes: int, *, blocks: int, norm: Norm = "group") -> None:
        super().__init__()
        make_norm = norm_layer(norm, groups=8)
        self.stem = nn.Sequential(_conv(3, 16, 3), make_norm(16), nn.ReLU())
        layers: list[nn.Module] = []
        inputs = 16
        for outputs in (16, 32, 64):
            for _ in range(blocks):
                stride = 1 if inputs == outputs else 2
                residual = nn.Sequential(
                    *(_conv(inputs, outputs, 3, stride), make_norm(outputs), nn.ReLU()),
                    *(_conv(outputs, outputs, 3), make_norm(outputs)),
                )
                skip = PadChannels(outputs - inputs) if stride == 2 else nn.Identity()
                layers.append(ResidualBlock(residual, skip))
                inputs = outputs
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)
        init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> logits [B, classes]."""
        logits: Tensor = self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


class ResNet50(nn.Module):
    """A stem, four stages of 3, 4, 6 and 3 bottleneck blocks, head.

    The stem for ImageNet divides the side by 4 before the first block; the small one keeps it.
    The stride is on the 3 x 3 convolution, as in all current implementations.
    """

    def __init__(self, classes: int, *, norm: Norm = "batch", stem: Stem = "imagenet") -> None:
        super().__init__()
        make_norm = norm_layer(norm, groups=32)
        if stem == "imagenet":
            self.stem = nn.Sequential(
                *(_conv(3, 64, 7, 2), make_norm(64), nn.ReLU(inplace=True)),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        else:
            self.stem = nn.Sequential(_conv(3, 64, 3), make_norm(64), nn.ReLU(inplace=True))
        layers: list[nn.Module] = []
        inputs = 64
        for stage, blocks in enumerate((3, 4, 6, 3)):
            width = 64 * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                residual = nn.Sequential(
                    *(_conv(inputs, width, 1), make_norm(width), nn.ReLU(inplace=True)),
                    *(_conv(width, width, 3, stride), make_norm(width), nn.ReLU(inplace=True)),
                    *(_conv(width, 4 * width, 1), make_norm(4 * width)),
                )
                skip: nn.Module = nn.Identity()
                if block == 0:
                    skip = nn.Sequential(_conv(inputs, 4 * width, 1, stride), make_norm(4 * width))
                layers.append(ResidualBlock(residual, skip))
                inputs = 4 * width
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)
        init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> logits [B, classes]."""
        logits: Tensor = self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """A residual branch added to its shortcut, then ReLU."""

    def __init__(self, residual: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.skip = skip

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, C, H, W] -> [B, C', H', W']."""
        return F.relu(self.residual(features) + self.skip(features))


class PadChannels(nn.Module):
    """The shortcut without parameters: every second pixel, and zeros for the new channels."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, C, H, W] -> [B, C + extra, H / 2, W / 2]."""
        before = self.extra // 2
        return F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, before, self.extra - before))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution with same padding and no bias, which the norm after it has."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
