"""ConvNeXt-T (Liu et al., 2022): 3, 3, 9, 3 blocks of 96, 192, 384, 768 channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYER_SCALE = 1e-6  # initial factor on each channel of a block's output


class ConvNeXt(nn.Module):
    """A stem of 4 x 4 patches, four stages, global average pooling, norm, head.

    Args:
        classes: number of logits.
        depths: blocks per stage.
        widths: channels per stage.
        drop_path: probability of skipping the last block for a sample; it rises linearly from 0
            at the first block (stochastic depth). 0.1 in the article's recipe.
    """

    def __init__(
        self,
        classes: int,
        *,
        depths: tuple[int, ...] = (3, 3, 9, 3),
        widths: tuple[int, ...] = (96, 192, 384, 768),
        drop_path: float = 0.1,
    ) -> None:
        super().__init__()
        rates = torch.linspace(0, drop_path, sum(depths)).tolist()
        layers: list[nn.Module] = []
        inputs = 3
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage == 0:
                layers += [nn.Conv2d(inputs, width, 4, stride=4), ChannelNorm(width)]
            else:
                layers += [ChannelNorm(inputs), nn.Conv2d(inputs, width, 2, stride=2)]
            layers += [ConvNeXtBlock(width, rates.pop(0)) for _ in range(depth)]
            inputs = width
        self.stages = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(inputs, eps=1e-6)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W], sides multiples of 32 -> logits [B, classes]."""
        logits: Tensor = self.head(self.norm(self.stages(images).mean(dim=(2, 3))))
        return logits


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7 convolution, norm, two pointwise layers, scaled and added back."""

    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.pointwise = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6),
            *(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )
        self.scale = nn.Parameter(torch.full((width,), LAYER_SCALE))
        self.drop_path = DropPath(drop_path)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, C, H, W] -> the same shape."""
        pixels = self.depthwise(features).permute(0, 2, 3, 1)
        change = (self.scale * self.pointwise(pixels)).permute(0, 3, 1, 2)
        result: Tensor = features + self.drop_path(change)
        return result


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, C, H, W] -> the same shape."""
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DropPath(nn.Module):
    """Stochastic depth: zero for random samples in training; the others are scaled up."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, change: Tensor) -> Tensor:
        """Change [B, ...] -> the same shape."""
        if not self.training or self.rate == 0.0:
            return change
        keep = torch.rand(len(change), device=change.device) >= self.rate
        return change * (keep / (1 - self.rate)).to(change.dtype).view(-1, *[1] * (change.ndim - 1))
