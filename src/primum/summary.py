"""A few lines on what the sample weights did in a run so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primum.monitor import Monitor
from primum.report import StepReport


def summary_of(title: str, reports: Sequence[StepReport], monitor: Monitor) -> str:
    """Five lines: layer and optimizer, harm, weights, time, fallbacks. Waits for the device.

    Args:
        title: The first line.
        reports: Of the last steps.
        monitor: Of the whole run.
    """
    return "\n  ".join([title, *_effect(reports, monitor), _time(monitor), _fallbacks(monitor)])


def _effect(reports: Sequence[StepReport], monitor: Monitor) -> list[str]:
    weighed = [report for report in reports if bool(report.finite)]  # SYNC: asked for
    if not weighed:
        return [
            f"samples harmed: unknown, no weights were computed in {monitor.steps} optimizer steps",
            "extra weights: none. WARNING: so far this run is plain training; see the fallbacks "
            "below, and primum's warnings",
        ]

    def mean(name: str) -> float:
        values = [getattr(report, name).double() for report in weighed]
        return torch.stack(values).mean().item()  # SYNC: asked for

    over = f"over the last {len(weighed)} backward passes" if len(weighed) > 1 else "last pass"
    before, after = mean("harmed_before"), mean("harmed_after")
    applied = any(report.weighed for report in weighed)
    per = weighed[-1].per
    largest = max(report.extra_weights.max().item() for report in weighed)  # SYNC: asked for
    note = "" if applied else " (observed, not applied)"
    if applied and largest == 0:
        note = f". WARNING: no {per} got extra weight; the steps harm none, or the radius is 0"
    if any(report.approximate for report in weighed):
        note += "; approximate, for a large vocabulary (exact=True solves exactly)"
    return [
        f"{per}s harmed by a step: {before:.1%} without weights, {after:.1%} with ({over})",
        f"extra weights: mean {mean('mean_extra_weight'):.3f}, largest {largest:.2f}{note}",
    ]


def _time(monitor: Monitor) -> str:
    each, share = monitor.time_spent()
    if each is None:
        return "time added: not measured before the third step"
    return f"time added: {1e3 * each:.2f} ms per step, {share:.1%} of the step (host clock)"


def _fallbacks(monitor: Monitor) -> str:
    count = int(monitor.fallbacks.value)  # SYNC: asked for
    discarded = int(monitor.discarded.value)
    reasons = [f"{reason} ({times})" for reason, times in monitor.reasons.most_common(3)]
    unknown = count - sum(monitor.reasons.values())
    if unknown > 0:
        reasons.append(f"values were not finite ({unknown})")
    text = f"fallbacks to plain gradients: {count} in {monitor.steps} optimizer steps"
    if reasons:
        text += ": " + "; ".join(reasons)
    if discarded:
        text += f"; reweighted gradients discarded without a step: {discarded}"
    return text
