"""From the runs of a sweep to one table per setting: last epochs, tests against base, time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from primum.experiments.report.groups import (
    Group,
    accuracy,
    ema_accuracy,
    extra_weight,
    group_runs,
    harmed_before,
    harmed_taken,
    until_base,
)
from primum.experiments.runs import RunRecord, without_nan
from primum.experiments.statistics import (
    Difference,
    Interval,
    difference,
    holm,
    interval,
    smallest_effect,
)

Figure = Callable[[RunRecord], "float | None"]


@dataclass(frozen=True)
class AgainstBase:
    """An arm against base in one figure, over the seeds both have.

    Attributes:
        change: Arm minus base; Welch's test is the main one, the paired test the second.
        adjusted_p: Welch's p-value after Holm's correction over all arms of the table.
        smallest: The true difference so many seeds would have shown four times out of five, at
            the strictest level of that correction.
    """

    change: Difference
    adjusted_p: float
    smallest: float

    @property
    def verdict(self) -> str:
        """In a word or two; `seen` needs the corrected main test."""
        if math.isnan(self.adjusted_p):
            return "one seed"
        if self.adjusted_p >= 0.05:
            return "not seen"
        return "higher" if self.change.welch.mean > 0 else "lower"


@dataclass(frozen=True)
class ArmSummary:
    """One arm: figures of the last epoch, percentages from 0 to 100; None where unknown.

    `steps_to_base` and `time_to_base`: from when on the test loss was no more than base's is at its
    end, as shares of base's steps and time; None unless every seed got there.
    """

    arm: str
    seeds: tuple[int, ...]
    accuracy: Interval | None
    loss: Interval | None
    ema_accuracy: Interval | None
    harmed_plain: Interval | None
    harmed_taken: Interval | None
    extra_weight: Interval | None
    ms_per_step: Interval | None
    time_ratio: Interval | None
    steps_to_base: Interval | None
    time_to_base: Interval | None
    accuracy_test: AgainstBase | None
    loss_test: AgainstBase | None
    ema_test: AgainstBase | None


@dataclass(frozen=True)
class SettingSummary:
    """All arms at the same settings."""

    title: str
    settings: dict[str, Any]
    arms: tuple[ArmSummary, ...]

    def arm(self, label: str) -> ArmSummary:
        """The row of an arm."""
        return next(each for each in self.arms if each.arm == label)


def summarise(records: Sequence[RunRecord]) -> list[SettingSummary]:
    """One summary per setting, in the order of the records."""
    return [_summarise(group) for group in group_runs(records)]


def as_json(summaries: Sequence[SettingSummary], command: str) -> str:
    """Everything in the summaries; what is not a number becomes null."""
    content = {
        "format": "primum-summary-1",
        "command": command,
        "settings": [asdict(each) for each in summaries],
    }
    return json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"


def _summarise(group: Group) -> SettingSummary:
    base = {run.seed: run for run in group.arms.get("base", ())}
    tests = [_tests(group, base, figure) for figure in (accuracy, _loss, ema_accuracy)]
    rows = [
        _row(label, group.arms[label], base, *(found.get(label) for found in tests))
        for label in group.arms
    ]
    return SettingSummary(group.title, group.settings, tuple(rows))


def _tests(group: Group, base: dict[int, RunRecord], figure: Figure) -> dict[str, AgainstBase]:
    """Every arm against base, as one family.

    Where a common seed lacks the figure, because its run diverged, there is no test: without that
    seed the arm would look better than it is.
    """
    values: dict[str, tuple[list[float], list[float]]] = {}
    for label, runs in group.arms.items():
        common = [run for run in runs if run.seed in base]
        own = [value for run in common if (value := figure(run)) is not None]
        other = [value for run in common if (value := figure(base[run.seed])) is not None]
        if label != "base" and common and len(own) == len(other) == len(common):
            values[label] = own, other
    changes = {label: difference(*both) for label, both in values.items()}
    adjusted = holm([change.welch_p for change in changes.values()])
    return {
        label: AgainstBase(change, p, smallest_effect(*values[label], family=len(values)))
        for (label, change), p in zip(changes.items(), adjusted, strict=True)
    }


def _row(
    label: str,
    runs: Sequence[RunRecord],
    base: dict[int, RunRecord],
    accuracy_test: AgainstBase | None,
    loss_test: AgainstBase | None,
    ema_test: AgainstBase | None,
) -> ArmSummary:
    def against(figure: Callable[[RunRecord, RunRecord], float | None]) -> Interval | None:
        return _over(runs, lambda run: figure(run, base[run.seed]) if run.seed in base else None)

    return ArmSummary(
        arm=label,
        seeds=tuple(run.seed for run in runs),
        accuracy=_over(runs, accuracy),
        loss=_over(runs, _loss),
        ema_accuracy=_over(runs, ema_accuracy),
        harmed_plain=_over(runs, harmed_before),
        harmed_taken=_over(runs, harmed_taken),
        extra_weight=_over(runs, extra_weight),
        ms_per_step=_over(runs, lambda run: run.final.get("ms_per_step")),
        time_ratio=against(_time_ratio),
        steps_to_base=against(lambda run, plain: until_base(run, plain, "step")),
        time_to_base=against(lambda run, plain: until_base(run, plain, "seconds")),
        accuracy_test=accuracy_test,
        loss_test=loss_test,
        ema_test=ema_test,
    )


def _over(runs: Sequence[RunRecord], figure: Figure) -> Interval | None:
    values = [figure(run) for run in runs]
    known = [value for value in values if value is not None]
    return interval(known) if known and len(known) == len(values) else None


def _loss(run: RunRecord) -> float | None:
    return run.final.get("test_loss")


def _time_ratio(run: RunRecord, base: RunRecord) -> float | None:
    mine, plain = run.final.get("ms_per_step"), base.final.get("ms_per_step")
    return mine / plain if mine and plain else None
