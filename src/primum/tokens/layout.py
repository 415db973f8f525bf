"""Weight samples or tokens: `per="auto"` and how it decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from primum.kernel.batch import count_rows
from primum.kernel.engine import Layout
from primum.kernel.recipe import Recipe

CHOICES = ("auto", "sample", "token")

BLOCK = 1 << 22  # Entries of the gradient that are looked at together: 16 MiB.
SAME, NONE = 0.9999, 0.01  # Shares of a squared length that count as all of it, and as nothing.

_log = logging.getLogger("primum")


class Granularity(Layout):
    """Whether samples or tokens are weighted: as asked or, under "auto", as the first pass shows.

    Tokens where the head's input is [B, T, d] and the loss has one term per position (see
    `seen_in`), samples elsewhere. Inputs [B, 1, d] and gradients that are zero or not finite
    leave the question open: nothing distinguishes samples from tokens.

    Args:
        asked: "auto", "sample" or "token".
        name: The head's, for the log.
        says: Whether this process logs the decision.

    Attributes:
        per: "sample" or "token": what applies in this pass.
        settled: Whether that is final.
    """

    def __init__(self, asked: str, name: str, *, says: bool = True) -> None:
        if asked not in CHOICES:
            raise ValueError(f'per must be "auto", "sample" or "token", got {asked!r}')
        self.per = "sample" if asked == "auto" else asked
        self.settled = asked != "auto"
        self._asked, self._name, self._says, self._shape = asked, name, says, torch.Size()

    def __str__(self) -> str:
        return self.per if self.settled else "auto"

    def terms_of(self, losses: Tensor, grad: Tensor) -> str:
        """What the losses of the explicit form are of, by their shape, if that is still open.

        As without it: positions of [B, T, d] may be tokens, and pixels are not.
        """
        if self.settled:
            return self.per
        by_sample = losses.dim() == 1 and len(losses) == count_rows(grad, "sample")
        return "sample" if by_sample or grad.dim() != 3 else "token"

    def look(self, grads: Sequence[Tensor], terms: str | None) -> int:
        """0 nothing is known, 1 or 2 samples or tokens are seen, 3 or 4 that was decided before.

        Waits for the device, in the one pass that decides.
        """
        if self.settled:
            return CHOICES.index(self.per) + 2
        first = grads[0]
        self._shape = first.shape[:-1]
        if terms is None:
            terms = seen_in(first) if first.dim() == 3 else "sample"
        return CHOICES.index(terms or "auto")

    def settle(self, votes: Sequence[int], recipe: Recipe) -> None:
        """Decide from the votes of all processes, alike on each.

        A process that has decided, as one that ran alone before, is followed; otherwise tokens are
        weighted if any process sees them.
        """
        decided = [vote - 2 for vote in votes if vote > 2]
        chosen = decided[0] if decided else max(votes)
        if self._asked != "auto" or chosen == 0:
            return
        before = str(self)
        self.per, self.settled = CHOICES[chosen], True
        choice = len(self._shape) == 2 and self._shape[1] > 1
        if self.per != before and choice and self._says and recipe.radius != 0:
            self._say(recipe.radius_of(self.per))

    def load(self, saved: str | None) -> None:
        """Take over the decision of a saved run."""
        if saved in CHOICES[1:] and self._asked == "auto":
            self.per, self.settled = str(saved), True

    def _say(self, radius: float | None) -> None:
        how = "" if radius is None else f", radius {radius:g}"
        if self.per == "token":
            # Seen without any setup of logging, and no error under -W error.
            _log.warning(
                "primum: reweighting tokens (%s positions at head %r, each with a loss)%s; pass "
                "per='token' to silence this, or per='sample' to reweight whole sequences",
                *(list(self._shape), self._name, how),
            )
        else:
            _log.info(
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
