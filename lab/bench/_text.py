"""A small language model, its training text, and per-token problems captured in training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lab.bench._capture import Moment, record


@dataclass(frozen=True)
class Setting:
    """Sizes of a training run; a vocabulary of up to 256 means characters."""

    vocabulary: int
    width: int
    sequences: int
    positions: int
    steps: int


SETTINGS = (
    Setting(100, 96, 12, 64, 300),
    Setting(4096, 96, 12, 64, 300),
    Setting(32_000, 64, 6, 64, 200),
)
RATES = {"sgd": 0.1, "adamw": 4e-3}


def read_text(path: Path | None) -> str:
    """A text file without verse numbers; by default Python's language reference."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    return re.sub(r"^[1-3]?[A-Z][a-z]*\d+:\d+ ", "", path.read_text(), flags=re.MULTILINE)


def numbered(text: str, vocabulary: int) -> Tensor:
    """Characters or words as integers, by rank of frequency; rarer ones share the last integer.

    Words are split from punctuation for vocabularies of up to 8,192, otherwise at white space.
    """
    pieces = list(text) if vocabulary <= 256 else re.findall(r"\w+|[^\w\s]", text)
    if vocabulary > 8192:
        pieces = text.split()
    ranks = {piece: i for i, (piece, _) in enumerate(Counter(pieces).most_common(vocabulary - 1))}
    return torch.tensor([ranks.get(piece, vocabulary - 1) for piece in pieces])


class LanguageModel(nn.Module):
    """A decoder-only transformer with flattened output: [B, T] -> [B * T, words]."""

    def __init__(self, words: int, width: int, positions: int, layers: int = 2, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for weight in (self.embed.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(positions)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words) + self.position
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden).flatten(0, 1))
        return logits


def optimizer_of(kind: str, model: nn.Module) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=RATES[kind], momentum=0.9)
    return AdamW(model.parameters(), lr=RATES[kind])


def batches(
    words: Tensor, setting: Setting, steps: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text [B, T], and the next tokens [B * T]."""
    for _ in range(steps):
        starts = torch.randint(
            len(words) - setting.positions - 1, (setting.sequences,), generator=generator
        )
        rows = torch.stack([words[s : s + setting.positions + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:].flatten()


def captured(kind: str, words: Tensor, setting: Setting, steps: int, at: list[int]) -> list[Moment]:
    """The per-token problems of these steps of plain training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel(setting.vocabulary, setting.width, setting.positions)
    rows = batches(words, setting, steps, torch.Generator().manual_seed(0))
    *_, found = record(model, optimizer_of(kind, model), rows, steps, at, plain=True)
    return found
