"""Two small classifiers for 8 x 8 images, each ending in one linear layer, the head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIDE = 10, 8


class GroupNormCNN(nn.Module):
    """Three convolutions with group norm, global average pooling, linear head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_block(1, width, stride=1),
            *_conv_block(width, 2 * width, stride=2),
            *_conv_block(2 * width, 2 * width, stride=1),
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, 8, 8], of which the first channel is used -> logits [B, 10]."""
        logits: Tensor = self.head(self.body(images[:, :1]).mean(dim=(2, 3)))
        return logits


def _conv_block(inputs: int, outputs: int, *, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return conv, nn.GroupNorm(4, outputs), nn.ReLU()


class PatchTransformer(nn.Module):
    """The image as 16 patches of 2 x 2 pixels, pre-norm blocks, mean over patches, linear head."""

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.5 * torch.randn((SIDE // patch) ** 2, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, 8, 8], of which the first channel is used -> logits [B, 10]."""
        patches = F.unfold(images[:, :1], self.patch, stride=self.patch).transpose(1, 2)
        tokens = self.blocks(self.embed(patches) + self.position)
        logits: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return logits


class EncoderBlock(nn.Module):
    """Self-attention, then a two-layer perceptron, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T, d] -> [B, T, d]."""
        split = self.query_key_value(self.attention_norm(tokens)).chunk(3, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in split)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.project(mixed)
        result: Tensor = tokens + self.mlp(tokens)
        return result
