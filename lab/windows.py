"""Batches of text: windows of consecutive tokens, with the next token of each position."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.epochs import SHIFT, Batch, Epochs, generator_of
from lab.images.sources import DataError


@dataclass(eq=False)
class Windows(Epochs):
    """Adjacent windows, with a new order and a new offset in each epoch.

    Args:
        tokens: Tokens of one part of a text. [N].
        length: Tokens per window.
        batch_size: Windows per step, over all ranks; other arguments as in `Epochs`.
        shuffle: If False, windows are in the order of the text, from its first token.

    Example:
        >>> windows = Windows(torch.arange(11), length=5, batch_size=2, shuffle=False)
        >>> batch = next(windows.epoch(0))
        >>> batch.inputs[1].tolist(), batch.targets[1].tolist()
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10])
    """

    tokens: Tensor
    length: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for windows of {self.length}; choose a "
                "shorter --length or a longer text"
            )
        super().__post_init__()

    @property
    def count(self) -> int:
        """Windows that fit for any offset, with one more token after the last."""
        return (len(self.tokens) - (self.length if self.shuffle else 1)) // self.length

    def make(self, ids: Tensor, epoch: int, step: int) -> Batch:
        """The windows with these ids. [B, T], [B, T], [B]."""
        first = 0
        if self.shuffle:
            generator = generator_of(self.seed, SHIFT, epoch)
            first = int(torch.randint(self.length, (), generator=generator))
        places = first + ids[:, None] * self.length + torch.arange(self.length)
        return Batch(self.tokens[places], self.tokens[places + 1], ids)
