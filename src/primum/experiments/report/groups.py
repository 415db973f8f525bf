"""Runs that may be compared with each other, and the table of their figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from primum.experiments.runs import RunRecord
from primum.experiments.statistics import Difference, Interval, as_family, difference, interval

Figure = Callable[[RunRecord], "float | None"]


class Column(NamedTuple):
    """A figure of a run: its heading, how to get it, digits shown."""

    heading: str
    of: Figure
    digits: int


@dataclass(frozen=True)
class Against:
    """One arm minus another, over the seeds both have. None where nothing was measured."""

    arm: str
    other: str
    seeds: int
    accuracy: Difference | None
    loss: Difference | None


@dataclass(frozen=True)
class Group:
    """Runs with the same name and settings, by arm and in the order of seeds; base comes first."""

    title: str
    settings: dict[str, Any]
    arms: dict[str, list[RunRecord]]

    @property
    def runs(self) -> list[RunRecord]:
        """All of them."""
        return [run for runs in self.arms.values() for run in runs]

    @property
    def seeds(self) -> list[int]:
        """All of them, sorted."""
        return sorted({run.seed for run in self.runs})

    @property
    def focus(self) -> str | None:
        """The arm to judge: primum, or else the first that is not base; none if it is alone."""
        others = [arm for arm in self.arms if arm != "base"] if len(self.arms) > 1 else []
        return "primum" if "primum" in others else next(iter(others), None)


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of the records. Settings that tell groups of one name apart are told."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        key = json.dumps([record.name, record.settings], sort_keys=True, default=str)
        found.setdefault(key, []).append(record)
    groups = []
    for runs in found.values():
        twins = [each[0] for each in found.values() if each[0].name == runs[0].name]
        arms = sorted({run.arm for run in runs}, key=lambda arm: _rank(arm, runs))
        groups.append(
            Group(
                title=runs[0].name + _apart(runs[0], twins),
                settings=runs[0].settings,
                arms={
                    arm: sorted((r for r in runs if r.arm == arm), key=lambda r: r.seed)
                    for arm in arms
                },
            )
        )
    return groups


def finished(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those that reached their end: only they are counted."""
    return [run for run in runs if run.complete]


def over_seeds(runs: Sequence[RunRecord], figure: Figure) -> Interval | None:
    """Mean and interval; None if a run lacks the figure, or none is finished."""
    values = [figure(run) for run in finished(runs)]
    known = [value for value in values if value is not None]
    return interval(known) if known and len(known) == len(values) else None


def columns(group: Group) -> list[Column]:
    """Those of the table for which some arm has a figure."""
    base = {run.seed: run for run in finished(group.arms.get("base", ()))}

    def ratio(run: RunRecord) -> float | None:
        plain = ms_per_step(base[run.seed]) if run.seed in base else None
        mine = ms_per_step(run)
        return mine / plain if mine and plain else None

    def share_of(axis: str) -> Figure:
        return lambda run: until_base(run, base[run.seed], axis) if run.seed in base else None

    every = [
        Column("test accuracy, %", accuracy, 1),
        Column("test loss", lambda run: run.final.get("test_loss"), 3),
        Column("test accuracy of averaged weights, %", ema_accuracy, 1),
        Column("harmed by plain step, %", harmed_before, 1),
        Column("harmed by step taken, %", harmed_taken, 1),
        Column("mean extra weight", extra_weight, 3),
        Column("time per step, x base", ratio, 2),
        Column("time per step, ms", ms_per_step, 1),
        Column("steps to base's last loss, x base", share_of("step"), 2),
        Column("time to base's last loss, x base", share_of("seconds"), 2),
    ]
    return [
        each
        for each in every
        if any(over_seeds(runs, each.of) is not None for runs in group.arms.values())
    ]


def against_others(group: Group) -> list[Against]:
    """The arm in focus against each of the others, as one family of tests for each figure."""
    focus = group.focus
    if focus is None:
        return []
    found = []
    for other, runs in group.arms.items():
        mine = {run.seed: run for run in finished(group.arms[focus])}
        theirs = {run.seed: run for run in finished(runs)}
        common = sorted(mine.keys() & theirs.keys())
        if other == focus or not common:
            continue
        pair = [mine[seed] for seed in common], [theirs[seed] for seed in common]
        found.append(
            Against(
                focus,
                other,
                len(common),
                accuracy=_difference(*pair, accuracy),
                loss=_difference(*pair, lambda run: run.final.get("test_loss")),
            )
        )
    accuracies, losses = (
        as_family([getattr(each, figure) for each in found]) for figure in ("accuracy", "loss")
    )
    return [
        replace(each, accuracy=accuracy, loss=loss)
        for each, accuracy, loss in zip(found, accuracies, losses, strict=True)
    ]


def moments_by_label(group: Group) -> dict[str, list[dict[str, Any]]]:
    """All looks of a group's first arm, by what was looked at."""
    runs = next(iter(group.arms.values()))
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for moment in run.moments:
            found.setdefault(moment["label"], []).append(moment)
    return found


def accuracy(run: RunRecord) -> float | None:
    """In percent."""
    value = run.final.get("test_accuracy")
    return None if value is None else 100 * value


def ema_accuracy(run: RunRecord) -> float | None:
    """Of the averaged weights, in percent."""
    value = run.final.get("ema_test_accuracy")
    return None if value is None else 100 * value


def harmed_before(run: RunRecord) -> float | None:
    """Share that the plain step would harm, seen through the head; mean over steps, in percent."""
    return _mean(run, "harmed_before", 100)


def harmed_taken(run: RunRecord) -> float | None:
    """Share that the step taken harms: with weights where they were applied."""
    applied = run.steps.get("applied")
    if applied is None:
        return None
    return _mean(run, "harmed_after" if any(applied) else "harmed_before", 100)


def extra_weight(run: RunRecord) -> float | None:
    """Mean over samples and steps, where weights were applied."""
    return _mean(run, "mean_extra_weight", 1) if any(run.steps.get("applied", ())) else None


def ms_per_step(run: RunRecord) -> float | None:
    """Milliseconds."""
    return run.final.get("ms_per_step")


def until_base(run: RunRecord, base: RunRecord, axis: str) -> float | None:
    """From where on the test loss was at most base's last, as a share of base's whole `axis`.

    None if it was not at the end. As fine as the evaluations are.

    Args:
        run: Any.
        base: Of the same seed.
        axis: `step`, `seconds` or `epoch`, a column of their curves.
    """
    losses, places = run.curves.get("test_loss"), run.curves.get(axis)
    theirs, whole = base.curves.get("test_loss"), base.curves.get(axis)
    if not (losses and places and theirs and whole):
        return None
    if theirs[-1] is None or not whole[-1]:
        return None
    since = None
    for loss, place in zip(losses, places, strict=True):
        if loss is None or loss > theirs[-1]:
            since = None
        elif since is None:
            since = place
    return None if since is None else float(since / whole[-1])


def _mean(run: RunRecord, column: str, scale: float) -> float | None:
    known = [value for value in run.steps.get(column, ()) if value is not None]
    return scale * fmean(known) if known else None


def _difference(
    mine: Sequence[RunRecord], theirs: Sequence[RunRecord], figure: Figure
) -> Difference | None:
    first = [value for run in mine if (value := figure(run)) is not None]
    second = [value for run in theirs if (value := figure(run)) is not None]
    return difference(first, second) if len(first) == len(second) == len(mine) else None


def _rank(arm: str, runs: Sequence[RunRecord]) -> tuple[int, int]:
    places = [run.arm for run in runs]
    return ({"base": 0, "primum": 1}.get(arm, 2), places.index(arm))


def _apart(run: RunRecord, twins: Sequence[RunRecord]) -> str:
    """What tells a run from its namesakes with other settings."""
    keys = [k for k in run.settings if any(t.settings.get(k) != run.settings[k] for t in twins)]
    told = ", ".join(f"{key} {run.settings[key]}" for key in keys)
    return f" ({told})" if told else ""
