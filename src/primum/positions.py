"""What gets a weight of its own, a sample or a token: `per="auto"` and how it decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import Node

from primum.capture import Pass, rows_of, samples
from primum.pipeline import Captured
from primum.recipe import Primum, Recipe

CHOICES = ("auto", "sample", "token")
RADIUS = {"sample": 0.4, "token": 0.1}  # the default for each

BLOCK = 1 << 22  # Entries of the gradient that are looked at together: 16 MiB.
SAME, NONE = 0.9999, 0.01  # Shares of a squared length that count as all of it, and as nothing.

logger = logging.getLogger("primum")


@dataclass(frozen=True)
class Call:
    """A call of the head that has no `Pass`: in a compiled graph."""

    features: Callable[[], Tensor]
    training: bool
    accumulator: Node | None = None  # not known


class Per:
    """Whether samples or tokens are weighed: as asked or, under "auto", as the first pass shows.

    Tokens where the head's input is [B, T, d] and the loss has one term per position (see
    `seen_in`), samples elsewhere. Inputs [B, 1, d] and gradients that are zero or not finite
    leave the question open: there is nothing to tell samples from tokens.

    Args:
        asked: "auto", "sample" or "token".
        name: The head's, for the log.
        radius_follows: Whether no radius was given, so that the default for `now` applies.

    Attributes:
        now: "sample" or "token": what applies in this pass.
        settled: Whether that is final.
    """

    def __init__(self, asked: str, name: str, *, radius_follows: bool = False) -> None:
        if asked not in CHOICES:
            raise ValueError(f'per must be "auto", "sample" or "token", got {asked!r}')
        self.now = "sample" if asked == "auto" else asked
        self.settled = asked != "auto"
        self._seen = 0
        self._asked, self._name, self._shape = asked, name, torch.Size()
        self._radius_follows = radius_follows

    @property
    def vote(self) -> int:
        """What this rank knows: 0 nothing, 1 or 2 that it sees samples or tokens, 3 or 4 that this
        was decided before.
        """
        known = CHOICES.index(self.now) if self.settled else 0
        return known + 2 if known else self._seen

    def __str__(self) -> str:
        return self.now if self.settled else "auto"

    def of_losses(self, losses: Tensor, gradient: Tensor) -> str:
        """What the losses of the explicit form are of, by their shape, if that is still open.

        As without it: positions of [B, T, d] may be tokens, and pixels are not.
        """
        if self.settled:
            return self.now
        by_sample = losses.dim() == 1 and len(losses) == rows_of(gradient, "sample")
        return "sample" if by_sample or gradient.dim() != 3 else "token"

    def look(self, gradients: Sequence[Tensor], given: str | None = None) -> None:
        """Make this rank's vote, from the gradients at the head's output or as `given`.

        Waits for the device, in the one pass that decides.
        """
        self._seen, first = 0, gradients[0]
        if self.settled:
            return
        self._shape = first.shape[:-1]
        if given is None:
            given = seen_in(first) if first.dim() == 3 else "sample"
        self._seen = CHOICES.index(given or "auto")

    def settle(self, votes: Sequence[int], recipe: Recipe, *, said: bool) -> Recipe:
        """Decide from the votes of all ranks, the same on each. Returns the recipe to use.

        A rank that has decided, as one that ran alone before, is followed; otherwise tokens are
        weighed if any rank sees them.
        """
        decided = [vote - 2 for vote in votes if vote > 2]
        chosen = decided[0] if decided else max(votes)
        if self._asked != "auto" or chosen == 0:
            return recipe
        before, self._seen = str(self), 0
        self.now, self.settled = CHOICES[chosen], True
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
        return self.settle([CHOICES.index(saved) + 2], recipe, said=False)

    def regrouped(
        self, captured: Captured, gradients: Sequence[Tensor], calls: Sequence[Pass | Call]
    ) -> Captured:
        """What was captured before the decision, by samples or tokens as decided."""
        inputs = samples([each.features() for each in calls], self.now)
        return replace(
            captured,
            features=inputs,
            gradients=samples(gradients, self.now),
            tokens=self.now == "token",
        )

    def _say(self, radius: float | None) -> None:
        how = "" if radius is None else f", radius {radius:g}"
        if self.now == "token":
            # Seen without any setup of logging, and no error under -W error.
            logger.warning(
                "primum: reweighting tokens (%s positions at head %r, each with a loss)%s; pass "
                "per='token' to silence this, or per='sample' to reweight whole sequences",
                *(list(self._shape), self._name, how),
            )
        else:
            logger.info(
                "primum: reweighting samples%s: head %r has %s positions, but one loss per "
                "sequence; pass per='token' to reweight positions",
                *(how, self._name, list(self._shape)),
            )


def seen_in(gradient: Tensor) -> str | None:
    """Whether the loss has a term for each "sample" or "token", as its gradient shows. [B, T, d].

    One term per sample where at most one position counts for each output (a picked position, a
    maximum over positions), where all rows of a sample are alike (logits averaged over positions),
    and where they sum to zero (a softmax over positions, as for the start of an answer). Otherwise
    one per token: more than one row that is not zero, in the mean, is enough, as positions may be
    ignored or masked. None if nothing can be said: one position, all zero, not finite, no values.
    """
    if type(gradient) is not Tensor or gradient.shape[1] < 2 or gradient.numel() == 0:
        return None
    rows = gradient.shape[:-1].numel()
    lowest, highest = gradient.aminmax()
    scale = torch.maximum(highest.abs(), lowest.abs()).float()
    wide = torch.float32
    squares = torch.zeros(gradient.shape[:-1], dtype=wide, device=gradient.device)
    blocks = torch.split(gradient, max(1, BLOCK // rows), -1)
    entries, columns, plain, alike, outputs = (torch.zeros_like(scale) for _ in range(5))
    for block in blocks:
        squares += (block.to(wide) / scale).square_().sum(-1)
        outputs = outputs + (block != 0).flatten(0, 1).any(0).sum()
    counts = squares > 0
    # One output, or two in a softmax, have one direction: only equal rows are then alike.
    each = torch.where(counts, torch.where(outputs > 2, squares.rsqrt(), 1.0), 0.0)
    for block in blocks:
        block = block.to(wide) / scale
        hits = block.count_nonzero(1)
        entries, columns = entries + hits.sum(), columns + (hits > 0).sum()
        plain = plain + block.sum(1).square_().sum()
        alike = alike + (block * each.unsqueeze(-1)).sum(1).square_().sum()
    most = (counts.sum(1) * (each.square() * squares).sum(1)).sum()
    per_position = (entries > columns) & (alike < SAME * most) & (plain > NONE * squares.sum())
    known = scale.isfinite() & (scale > 0)
    verdict = int(torch.where(known, per_position + 1, 0))  # SYNC: once, to decide
    return CHOICES[verdict] if verdict else None
