"""What gets a weight of its own, a sample or a token: `per="auto"` and how it decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from primum.capture import rows_of, samples
from primum.pipeline import Captured
from primum.ranks import Vote
from primum.recipe import Primum, Recipe

Features = Callable[[], Tensor]  # the head's input, which may be gone

CHOICES = ("auto", "sample", "token")
RADIUS = {"sample": 0.2, "token": 0.1}  # the default for each

BLOCK = 1 << 22  # Entries of the gradient that are looked at together: 16 MiB.
SAME, NONE = 0.9999, 0.01  # Shares of a squared length that count as all of it, and as nothing.

logger = logging.getLogger("primum")


class Per:
    """Whether samples or tokens are weighed: as asked or, under "auto", as the first pass shows.

    Tokens where the head's input is [B, T, d] and the loss has one term per position (see
    `count_terms`), samples elsewhere. Inputs [B, 1, d] and gradients that are zero or not finite
    leave the question open: there is nothing to tell samples from tokens.

    Args:
        asked: "auto", "sample" or "token".
        name: The head's, for the log.
        radius_follows: Whether no radius was given, so that the default for `now` applies.

    Attributes:
        now: "sample" or "token": what applies in this pass.
        settled: Whether that is final.
        vote: What this rank knows in this pass: 0 if open, else the index of `now` in `CHOICES`;
            the sequences that have a loss; the terms of that loss.
    """

    def __init__(self, asked: str, name: str, *, radius_follows: bool = False) -> None:
        if asked not in CHOICES:
            raise ValueError(f'per must be "auto", "sample" or "token", got {asked!r}')
        self.now = "sample" if asked == "auto" else asked
        self.settled = asked != "auto"
        self.vote: Vote = self._own()
        self._asked, self._name, self._shape = asked, name, torch.Size()
        self._radius_follows = radius_follows

    def __str__(self) -> str:
        return self.now if self.settled else "auto"

    def of_losses(self, losses: Tensor, gradient: Tensor) -> str:
        """What the losses of the explicit form are of, by their shape, if that is still open."""
        if self.settled:
            return self.now
        by_sample = losses.dim() == 1 and len(losses) == rows_of(gradient, "sample")
        return "sample" if by_sample else "token"

    def look(self, gradients: Sequence[Tensor], given: str | None = None) -> None:
        """Make this rank's vote, from the gradients at the head's output or as `given`.

        Waits for the device, in the one pass that decides.
        """
        self.vote, first = self._own(), gradients[0]
        if self.settled:
            return
        self._shape = first.shape[:-1]
        if given is not None:
            self.vote = 0, 1, 1 + (given == "token")
        elif first.dim() != 3:
            self.vote = 0, 1, 1
        elif first.shape[1] > 1:
            self.vote = 0, *count_terms(first)

    def settle(self, votes: Sequence[Vote], recipe: Recipe, *, said: bool) -> Recipe:
        """Decide from the votes of all ranks, the same on each. Returns the recipe to use.

        A rank that has decided, as one that ran alone before, is followed.
        """
        known = [CHOICES[code] for code, _, _ in votes if code]
        sequences, terms = (sum(each[i] for each in votes) for i in (1, 2))
        if self._asked != "auto" or not (known or sequences):
            return recipe
        before = str(self)
        self.now = known[0] if known else "token" if terms > sequences else "sample"
        self.settled = True
        if self.now == before:
            return recipe
        if self._radius_follows and isinstance(recipe, Primum):
            recipe = replace(recipe, radius=RADIUS[self.now])
        if said and len(self._shape) == 2 and self._shape[1] > 1:  # there was a choice
            self._say(getattr(recipe, "radius", None))
        return recipe

    def load(self, saved: str | None, recipe: Recipe) -> Recipe:
        """Take over the decision of a saved run. Returns the recipe to use."""
        if saved not in RADIUS:
            return recipe
        return self.settle([(CHOICES.index(saved), 0, 0)], recipe, said=False)

    def regrouped(
        self, captured: Captured, gradients: Sequence[Tensor], features: Sequence[Features]
    ) -> Captured:
        """What was captured before the decision, by samples or tokens as decided."""
        inputs = samples([each() for each in features], self.now)
        return replace(captured, features=inputs, gradients=samples(gradients, self.now))

    def _say(self, radius: float | None) -> None:
        how = "" if radius is None else f", radius {radius:g}"
        if self.now == "token":
            # Seen without any setup of logging, and no error under -W error.
            logger.warning(
                "primum: weighing tokens (%s positions of head %r, each with a loss)%s; pass "
                "per='token' to silence this, per='sample' to weigh whole sequences",
                *(list(self._shape), self._name, how),
            )
        else:
            logger.info(
                "primum: weighing samples%s: head %r has %s positions, but one loss per sequence; "
                "pass per='token' to weigh positions",
                *(how, self._name, list(self._shape)),
            )

    def _own(self) -> Vote:
        return CHOICES.index(self.now) if self.settled else 0, 0, 0


def count_terms(gradient: Tensor) -> tuple[int, int]:
    """Sequences that have a loss, and the terms of it, as the gradient shows. [B, T, d_out].

    One term per sequence where at most one position counts for each output (a picked position, a
    maximum over positions), where all rows of a sequence are alike (logits averaged over
    positions), and where they sum to zero (a softmax over positions, as for the start of an
    answer). Otherwise one per row that is not zero. (0, 0) if nothing is known: all zero, not
    finite, or no values to read.
    """
    if type(gradient) is not Tensor:
        return 0, 0
    rows, width = gradient.shape[:-1].numel(), gradient.shape[-1]
    lowest, highest = gradient.aminmax()
    scale = torch.maximum(highest.abs(), lowest.abs()).float()
    wide = torch.float32
    squares = torch.zeros(gradient.shape[:-1], dtype=wide, device=gradient.device)
    blocks = torch.split(gradient, max(1, BLOCK // rows), -1)
    for block in blocks:
        squares += (block.to(wide) / scale).square_().sum(-1)
    counts = squares > 0
    # One output, or two in a softmax, have one direction: only equal rows are then alike.
    each = torch.where(counts, squares.rsqrt(), 0.0) if width > 2 else counts.to(wide)
    entries, columns, plain, alike = (torch.zeros_like(scale) for _ in range(4))
    for block in blocks:
        block = block.to(wide) / scale
        hits = block.count_nonzero(1)
        entries, columns = entries + hits.sum(), columns + (hits > 0).sum()
        plain = plain + block.sum(1).square_().sum()
        alike = alike + (block * each.unsqueeze(-1)).sum(1).square_().sum()
    lengths = counts.sum(1)
    most = (lengths * (each.square() * squares).sum(1)).sum()
    per_position = (entries > columns) & (alike < SAME * most) & (plain > NONE * squares.sum())
    known = scale.isfinite() & (scale > 0)
    sequences, found = (lengths > 0).sum() * known, lengths.sum() * known
    figures = torch.stack((sequences, torch.where(per_position, found, sequences)))
    with_loss, terms = figures.tolist()  # SYNC: once, in the pass that decides
    return with_loss, terms
