"""Vision transformers for small images, as in the implementation that the paper builds on.

Sizes and details follow github.com/omihub777/ViT-CIFAR, which the paper cites (App. E): 8 x 8
patches for any image size, a class token, an MLP as wide as the tokens, no dropout. Two details
differ from other transformers and are kept: attention scores are divided by the square root of the
width, not of the width per head, and the MLP ends in a GELU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViT(nn.Module):
    """Patches as tokens, pre-norm encoder blocks, head on the class token.

    Args:
        classes: number of logits.
        image_size: side of the images; must be a multiple of `patches`.
        width: size of a token and of the hidden layer of the MLP.
        depth: number of blocks.
        heads: attention heads; must divide `width`.
        patches: patches along one side.
        dropout: after attention and after both layers of the MLP.
    """

    def __init__(
        self,
        classes: int,
        *,
        image_size: int = 32,
        width: int = 384,
        depth: int = 7,
        heads: int = 12,
        patches: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patches:
            raise ValueError(
                f"image_size must be a multiple of {patches}, the patches along one side, "
                f"got {image_size}"
            )
        self.patch = image_size // patches
        self.embed = nn.Linear(3 * self.patch**2, width)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, patches**2 + 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, H] -> logits [B, classes]."""
        rows = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        tokens = self.embed(rows)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = self.blocks(tokens + self.position)
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits


class ViTBlock(nn.Module):
    """Self-attention, then the MLP, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width {width}, got {heads}")
        self.heads = heads
        self.scale = width**-0.5
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            *(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T, d] -> [B, T, d]."""
        split = self.query_key_value(self.attention_norm(tokens)).chunk(3, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in split)
        # Not the fused function, which has no vmap rule on the CPU and is no faster here.
        mixed = (self.scale * query @ key.transpose(-2, -1)).softmax(dim=-1) @ value
        tokens = tokens + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        result: Tensor = tokens + self.mlp(tokens)
        return result
