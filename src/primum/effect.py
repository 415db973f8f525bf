"""Whether the weights have any effect: asked once, after the first hundred steps."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

STEPS = 100
# A mean extra weight below the first, or below the second times the radius, is no effect. Images
# had 0.2 times the radius or more in all stored runs, and per token text had 0.4.
LEAST, LEAST_OF_RADIUS = 1e-3, 0.05
MANY = 0.1  # Share of samples that are harmed, above which there was something to remove.
SMALL = 0.01  # A radius below this leaves no room for weights.


class Effect:
    """Counts steps, and sums extra weights on the device, until it is known whether they matter.

    Only passes whose weights go into the gradients count: not those of `observe`, of a paused
    Reducer or of radius 0.
    """

    def __init__(self) -> None:
        self._rows = self._steps = self._fallen = 0
        self._total: Tensor | None = None
        self._last: tuple[Tensor, str, float | None, bool] | None = None
        self._known = self._weighed = False

    def add(
        self, weights: Tensor, drift: Tensor, per: str, radius: float | None, sequences: bool
    ) -> None:
        """Note a weighed pass. weights [B], drift [B]; `sequences` if the head saw [B, T, d]."""
        if self._known:
            return
        self._weighed = True  # since the last step
        total = weights.norm(1)  # a recipe may have negative ones
        self._total = total if self._total is None else self._total + total
        self._rows += len(weights)
        self._last = drift, per, radius, sequences

    def after_step(self, reasons: Counter[str], *, reached: bool) -> str:
        """A step was made, after a pass if `reached`. What to warn of; empty if nothing.

        Args:
            reasons: Of passes that fell back to plain gradients.
            reached: Whether a backward pass has gone through the head since the last step.
        """
        weighed, self._weighed = self._weighed, False
        before, self._fallen = self._fallen, reasons.total()
        counts = weighed or (self._total is None and self._fallen > before)
        if self._known or not reached or not counts:
            return ""
        self._steps += 1
        if self._steps < STEPS:
            return ""
        self._known, last, self._last = True, self._last, None
        if self._total is None or last is None:
            reason, times = reasons.most_common(1)[0]
            return f"no weights were computed in {STEPS} steps: {reason} ({times} times)"
        drift, per, radius, sequences = last
        figures = torch.stack((self._total / self._rows, (drift > 0).to(self._total).mean()))
        mean, harmed = figures.tolist()  # SYNC: once, after a hundred steps
        if not mean < max(LEAST, LEAST_OF_RADIUS * (radius or 0.0)):  # NaN: counted as a fallback
            return ""
        return (
            f"in {STEPS} steps hardly any {per} got an extra weight (mean {mean:.2g}), so this is "
            f"plain training at a higher cost. {_why(harmed, per, radius, sequences)}"
        )


def _why(harmed: float, per: str, radius: float | None, sequences: bool) -> str:
    if radius is not None and radius < SMALL:
        return f"radius={radius:g} leaves no room for weights; the default is larger"
    if per == "sample" and sequences:
        return (
            f"The last step raised the loss of {harmed:.1%} of the sequences: few whole sequences "
            "are harmed, since each loss is a mean over many positions; pass per='token' to "
            "reweight positions individually"
        )
    if harmed > MANY:
        return (
            f"The last step raised the loss of {harmed:.1%} of the {per}s; either weights this "
            "small are enough, or the radius or the recipe allows no larger ones; pass a larger "
            "radius to try, or call primum.detach(model) to save the overhead"
        )
    return (
        f"The last step raised the loss of {harmed:.1%} of the {per}s, so there is little "
        "interference to reduce; call primum.detach(model) to save the overhead"
    )
