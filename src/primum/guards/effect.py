"""Whether the weights have any effect: asked once, after the first hundred steps."""

from __future__ import annotations

import torch
from torch import Tensor

from primum.kernel.engine import Engine, Observer, weak
from primum.kernel.report import StepReport

STEPS = 100
# A mean extra weight below the first, or below the second times the radius, is no effect. Images
# had 0.2 times the radius or more in all stored runs, and per token text had 0.4.
LEAST, LEAST_OF_RADIUS = 1e-3, 0.05
MANY = 0.1  # Share of samples that are harmed, above which there was something to remove.
SATURATED, HARDLY = 0.4, 0.75  # A mean weight above, and a share of the harmed that is left.
SMALL = 0.01  # A radius below this leaves no room for weights.


class Effect(Observer):
    """Sums extra weights on the device for a hundred steps, then says once if they do not matter.

    Only passes whose weights go into the gradients count: not those of `observe`, of a paused
    Reducer or of radius 0.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weak(engine)
        self._rows = self._steps = self._fallen = 0
        self._total: Tensor | None = None
        self._last: StepReport | None = None
        self._sequences = self._known = self._weighted = False

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        self._sequences = grad.dim() > 2

    def on_solution(self, report: StepReport) -> None:
        if self._known or self._engine.plain:
            return
        self._weighted = True  # since the last step
        weights = report.extra_weights.norm(1)  # a recipe may have negative ones
        harmed = [(drift > 0).sum() for drift in (report.drift, report.drift_after)]
        total = torch.stack([weights, *(each.to(weights) for each in harmed)])
        self._total = total if self._total is None else self._total + total
        self._rows += len(report.extra_weights)
        self._last = report

    def after_step(self, passed: bool) -> None:
        """A step was made; `passed` if a backward pass has gone through the head before it."""
        reasons = self._engine.reasons
        weighted, self._weighted = self._weighted, False
        before, self._fallen = self._fallen, sum(reasons.values())
        counts = weighted or (self._total is None and self._fallen > before)
        if self._known or not passed or not counts:
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        self._known, last, self._last = True, self._last, None
        if self._total is None or last is None:
            reason = max(reasons, key=lambda each: reasons[each])
            message = (
                f"no weights were computed in {STEPS} steps: {reason} ({reasons[reason]} times)"
            )
        else:
            message = self._judge(self._total / self._rows, last)
        if message:
            self._engine.warn("effect", message, UserWarning)

    def _judge(self, means: Tensor, last: StepReport) -> str:
        """What to warn of; empty if the weights do something.

        Of all rows of all passes: extra weight, share harmed without and with weights. [3].
        """
        per, radius = last.per, self._engine.recipe.radius_of(last.per) or 0.0
        mean_weight, before, after = means.tolist()  # SYNC: once, after a hundred steps
        if mean_weight > SATURATED and after > HARDLY * before:
            return (
                f"weights saturate: the mean extra weight is {mean_weight:.2f}, and {after:.0%} of "
                f"the {per}s are still harmed by a step ({before:.0%} without weights). Outputs "
                "with few dimensions leave no direction that helps one sample and not the others; "
                "call primum.detach(model) to save the overhead"
            )
        if not mean_weight < max(LEAST, LEAST_OF_RADIUS * radius):  # NaN: counted as a fallback
            return ""
        return (
            f"in {STEPS} steps hardly any {per} got an extra weight (mean {mean_weight:.2g}), so "
            "this is plain training at a higher cost. "
            f"{_why(before, per, radius, self._sequences)}"
        )


def _why(harmed: float, per: str, radius: float, sequences: bool) -> str:
    if radius < SMALL:
        return f"radius={radius:g} leaves no room for weights; the default is larger"
    if per == "sample" and sequences:
        return (
            f"A step raised the loss of {harmed:.1%} of the sequences: few whole sequences "
            "are harmed, since each loss is a mean over many positions; pass per='token' to "
            "reweight positions individually"
        )
    if harmed > MANY:
        return (
            f"A step raised the loss of {harmed:.1%} of the {per}s; either weights this "
            "small are enough, or the radius or the recipe allows no larger ones; pass a larger "
            "radius to try, or call primum.detach(model) to save the overhead"
        )
    return (
        f"A step raised the loss of {harmed:.1%} of the {per}s, so there is little "
        "interference to reduce; call primum.detach(model) to save the overhead"
    )
