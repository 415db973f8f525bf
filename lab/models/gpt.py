"""A small GPT: token and position embeddings, pre-norm blocks, causal attention, linear head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST = 0.02  # standard deviation of the initialisation, as in GPT-2


class GPT(nn.Module):
    """A decoder with the architecture of GPT-2.

    Args:
        vocabulary: Size of the vocabulary.
        length: Maximum sequence length.
        width: Embedding size.
        depth: Number of blocks.
        heads: Attention heads; must divide `width`.
        dropout: After the embedding, attention and MLP.
        tied: Whether the head shares the weight of the token embedding.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 96,
        depth: int = 3,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width {width}, got {heads}")
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=FIRST)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):  # outputs of residual branches
                nn.init.normal_(parameter, std=FIRST / (2 * depth) ** 0.5)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> logits [B, T, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.token(tokens) + self.place(places))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class GPTBlock(nn.Module):
    """Causal self-attention, then the MLP, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, 4 * width)
        self.mlp_project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        split = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        further = self.mlp_project(F.gelu(self.mlp(self.mlp_norm(hidden))))
        result: Tensor = hidden + self.dropout(further)
        return result
