"""Cross entropy of a linear head that is never called: a few outputs at a time, computed again.

No tensor of the logits of all tokens exists. The first pass over the outputs leaves one number per
token, the logarithm of its normaliser; with it any block of the gradient at the output can be
computed by itself, as often as it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from primum.rules import on_host, wide

FEW = 1 << 17  # Entries of a block that are never too many: half a mebibyte in float32.

Look = Callable[[slice, Tensor], None]  # at a block of outputs and the gradient there


@dataclass(frozen=True)
class Streamed:
    """Features, head and targets of N tokens.

    Attributes:
        features: The head's input. [N, d].
        weight: Of the head. [d_out, d].
        bias: [d_out], or None.
        targets: Classes. [N].
        ignore_index: Tokens with this target count for nothing.
        smoothing: Share of the target that is spread evenly over all outputs.
        width: Outputs in a block.
        low: The type in which products of the head's size are made, as the head would make them.
        normaliser: Logarithm of the sum of exponentials, known after `losses`. [N].
        rows: Gradient of each token's loss. [N].
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    ignore_index: int
    smoothing: float
    width: int
    low: torch.dtype
    normaliser: Tensor | None = None
    rows: Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        """The type of sums, losses and weights."""
        return wide(self.low)

    @property
    def counted(self) -> Tensor:
        """Whether a token counts. [N]."""
        return self.targets != self.ignore_index

    def blocks(self) -> Iterator[slice]:
        outputs = len(self.weight)
        for first in range(0, outputs, self.width):
            yield slice(first, min(first + self.width, outputs))

    def cast(self) -> Streamed:
        """The same with features in the type of the products: cast once, not in every block."""
        return replace(self, features=self.features.to(self.low))

    def part(self, rows: slice) -> Tensor:
        """The weight of some outputs, in the type of the products."""
        return self.weight[rows].to(self.low)

    def logits(self, rows: slice) -> Tensor:
        """Of some outputs, rounded as the head would round them. -> [N, n], wide."""
        bias = None if self.bias is None else self.bias[rows].to(self.low)
        return linear(self.features.to(self.low), self.part(rows), bias).to(self.wide)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Cross entropy and normaliser of each token, 0 where it is ignored. -> [N], [N].

        A target that is no class raises an error, or gives NaN where only the device knows it.
        """
        known = (self.targets >= 0) & (self.targets < len(self.weight)) | ~self.counted
        if on_host(known) and not bool(known.all()):
            wrong = self.targets[~known][0].item()
            raise IndexError(f"target {wrong} is out of bounds for {len(self.weight)} classes")
        tokens = self.features.new_zeros(len(self.features), dtype=self.wide)
        largest, total = tokens - torch.inf, tokens.clone()
        hit, spread = tokens.clone(), tokens.clone()
        for rows in self.blocks():
            logits = self.logits(rows)
            inside, column = self._targets_in(rows)
            hit += torch.where(inside, logits.gather(1, column).squeeze(1), 0.0)
            if self.smoothing:
                spread += logits.sum(1)
            most = torch.maximum(largest, logits.amax(1))
            total *= (largest - most).exp()
            total += logits.sub_(most.unsqueeze(1)).exp_().sum(1)
            largest = most
        normaliser = total.log_().add_(largest)
        expected = hit.mul_(1 - self.smoothing).add_(
            spread, alpha=self.smoothing / len(self.weight)
        )
        losses = torch.where(known, normaliser - expected, torch.nan)
        return torch.where(self.counted, losses, 0.0), normaliser

    def _targets_in(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Whether a target is among some outputs, and its column there if so. -> [N], [N, 1]."""
        inside = (self.targets >= rows.start) & (self.targets < rows.stop)
        column = (self.targets - rows.start).clamp(0, rows.stop - rows.start - 1)
        return inside, column.unsqueeze(1)

    def gradient(self, rows: slice) -> Tensor:
        """At some outputs of the head. -> [N, n], wide."""
        assert self.normaliser is not None
        assert self.rows is not None
        scale = torch.where(self.counted, self.rows.to(self.wide), 0.0).unsqueeze(1)
        found = self.logits(rows).sub_(self.normaliser.unsqueeze(1)).exp_()
        if self.smoothing:
            found -= self.smoothing / len(self.weight)
        inside, column = self._targets_in(rows)
        found.scatter_add_(1, column, (inside.to(found.dtype) * (self.smoothing - 1)).unsqueeze(1))
        # What does not count may be infinite, and 0 times that is not a number.
        return found.mul_(scale).masked_fill_(scale == 0, 0.0)


@dataclass(frozen=True)
class Gradients:
    """Of the features, the weight and the bias, each in its own type; None where none is needed."""

    features: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def like(cls, source: Streamed, needed: tuple[bool, bool, bool]) -> Gradients:
        """Empty ones."""
        features, weight, bias = source.features, source.weight, source.bias
        return cls(
            torch.zeros_like(features, dtype=source.wide) if needed[0] else None,
            torch.empty_like(weight) if needed[1] else None,
            torch.empty_like(bias) if needed[2] and bias is not None else None,
        )

    def take(self, source: Streamed, rows: slice, found: Tensor) -> None:
        """Put in what follows from the gradient at some outputs. found [N, n]."""
        low = found.to(source.low)
        if self.features is not None:
            self._add(self.features, low, source.part(rows))
        if self.weight is not None:
            self._put(self.weight[rows], low.t(), source.features.to(source.low))
        if self.bias is not None:
            self.bias[rows] = found.sum(0, dtype=source.wide).to(self.bias.dtype)

    @staticmethod
    def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total += left @ right

    @staticmethod
    def _put(place: Tensor, left: Tensor, right: Tensor) -> None:
        if place.dtype == left.dtype:
            torch.mm(left, right, out=place)
        else:
            place.copy_(left @ right)


def visit(source: Streamed, into: Gradients | None, *looks: Look) -> None:
    """Go once through all outputs: fill the gradients, then let others look at each block."""
    source = source.cast()
    for rows in source.blocks():
        found = source.gradient(rows)
        if into is not None:
            into.take(source, rows, found)
        for look in looks:
            look(rows, found)


def default_width(tokens: int, inputs: int, outputs: int) -> int:
    """Outputs in a block: so many that a block of logits is a quarter of the features.

    But no more than a 64th of the outputs, so that what is made for a block of the weight (the
    optimizer's step) is small beside the weight. Blocks of `FEW` entries are never too large.
    """
    by_tokens = max(FEW // max(tokens, 1), inputs // 4)
    by_weight = max(FEW // max(inputs, 1), outputs // 64)
    return max(1, min(outputs, by_tokens, by_weight))
