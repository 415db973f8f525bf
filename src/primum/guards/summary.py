"""A few lines on what the sample weights did in a run so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from primum.guards.steps import StepWatch
from primum.guards.watchers import Stopwatch
from primum.kernel.engine import Engine, Observer
from primum.kernel.report import StepReport

RECENT = 2  # Reports that the summary is about.


class Recent(Observer):
    """Keeps the last few reports of weights."""

    def __init__(self) -> None:
        self.reports: deque[StepReport] = deque(maxlen=RECENT)

    def on_solution(self, report: StepReport) -> None:
        self.reports.append(report)


def summary_of(
    title: str, recent: Recent, engine: Engine, watch: StepWatch, stopwatch: Stopwatch
) -> str:
    """Five lines: layer and optimizer, harm, weights, time, fallbacks. Waits for the device."""
    lines = _effect(list(recent.reports), watch.steps)
    return "\n  ".join([title, *lines, _time(stopwatch), _fallbacks(engine, watch.steps)])


def _effect(reports: Sequence[StepReport], steps: int) -> list[str]:
    weighted = [report for report in reports if bool(report.finite)]  # SYNC: asked for
    if not weighted:
        return [
            f"samples harmed: unknown, no weights were computed in {steps} optimizer steps",
            "extra weights: none. WARNING: so far this run is plain training; see the fallbacks "
            "below, and primum's warnings",
        ]

    def mean(name: str) -> float:
        values = [getattr(report, name).double() for report in weighted]
        return torch.stack(values).mean().item()  # SYNC: asked for

    over = f"over the last {len(weighted)} backward passes" if len(weighted) > 1 else "last pass"
    before, after = mean("harmed_before"), mean("harmed_after")
    applied = any(report.weighted for report in weighted)
    per = weighted[-1].per
    largest = max(report.extra_weights.max().item() for report in weighted)  # SYNC: asked for
    note = "" if applied else " (observed, not applied)"
    if applied and largest == 0:
        note = f". WARNING: no {per} got extra weight; the steps harm none, or the radius is 0"
    if any(report.approximate for report in weighted):
        note += "; approximate, for a large vocabulary (primum.Primum(exact=True) is exact)"
    return [
        f"{per}s harmed by a step: {before:.1%} without weights, {after:.1%} with ({over})",
        f"extra weights: mean {mean('mean_extra_weight'):.3f}, largest {largest:.2f}{note}",
    ]


def _time(stopwatch: Stopwatch) -> str:
    each, share = stopwatch.per_step()
    if each is None:
        return "time added: not measured before the third step"
    return f"time added: {1e3 * each:.2f} ms per step, {share:.1%} of the step (host clock)"


def _fallbacks(engine: Engine, steps: int) -> str:
    count = int(engine.fallbacks.value)  # SYNC: asked for
    discarded = int(engine.discarded.value)
    common = sorted(engine.reasons.items(), key=lambda each: -each[1])[:3]
    reasons = [f"{reason} ({times})" for reason, times in common]
    unknown = count - sum(engine.reasons.values())
    if unknown > 0:
        reasons.append(f"values were not finite ({unknown})")
    text = f"fallbacks to plain gradients: {count} in {steps} optimizer steps"
    if reasons:
        text += ": " + "; ".join(reasons)
    if discarded:
        text += f"; reweighted gradients discarded without a step: {discarded}"
    return text
