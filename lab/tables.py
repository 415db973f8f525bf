"""Metrics of runs, runs grouped by settings, and arms compared by the statistical rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from lab.runs import RunRecord, without_nan
from lab.statistics import Difference, Interval, family, interval

MACHINE = ("processor", "instructions", "processor cores", "device")
TESTED = ("accuracy", "loss", "ema_accuracy", "views_accuracy")  # metrics that arms are compared by


class Metric(NamedTuple):
    """A metric: heading on a page, heading on a terminal, digits shown, which sign is better."""

    heading: str
    short: str
    digits: int
    better: str = "higher"


HELD_OUT_LOSS = Metric("held-out loss, nats per token", "loss, nats", 3, "lower")  # of language
METRICS: dict[str, Metric] = {
    "accuracy": Metric("test accuracy, %", "test acc %", 2),
    "loss": Metric("test loss", "test loss", 3, "lower"),
    "ema_accuracy": Metric("test accuracy of averaged weights, %", "EMA acc %", 2),
    "views_accuracy": Metric("test accuracy over several views, %", "views acc %", 2),
    "harmed_plain": Metric("harmed by plain step, %", "harmed %", 1),
    "harmed_taken": Metric("harmed by step taken, %", "taken %", 1),
    "extra_weight": Metric("mean extra weight", "extra w", 3),
    "ms_per_step": Metric("time per step, ms", "ms/step", 1),
    "time_ratio": Metric("time per step, x base", "time x", 2),
    "steps_to_base": Metric("steps to base's final loss, x base", "steps to", 2),
    "time_to_base": Metric("time to base's final loss, x base", "time to", 2),
}


def metrics_of(run: RunRecord, base: RunRecord | None = None) -> dict[str, float | None]:
    """All metrics of a run; None if unknown.

    The step taken is the weighted one if weights were applied. The last three metrics are relative
    to `base`, base's run with the same seed; times are only compared on the same machine.
    """
    applied = run.steps.get("applied")
    weighted = applied is not None and any(applied)
    found = {
        "accuracy": _scaled(run.final.get("test_accuracy"), 100),
        "loss": run.final.get("test_loss"),
        "ema_accuracy": _scaled(run.final.get("ema_test_accuracy"), 100),
        "views_accuracy": _scaled(run.final.get("views_test_accuracy"), 100),
        "harmed_plain": _mean(run, "harmed_before", 100),
        "extra_weight": _mean(run, "mean_extra_weight") if weighted else None,
        "ms_per_step": run.final.get("ms_per_step"),
    }
    if applied is not None:
        found["harmed_taken"] = _mean(run, "harmed_after" if weighted else "harmed_before", 100)
    if base is not None:
        found["steps_to_base"] = until_base(run, base, "step")
        if same_machine(run, base):
            mine, plain = found["ms_per_step"], base.final.get("ms_per_step")
            found["time_ratio"] = mine / plain if mine and plain else None
            found["time_to_base"] = until_base(run, base, "seconds")
    return {name: found.get(name) for name in METRICS}


def same_machine(run: RunRecord, other: RunRecord) -> bool:
    """Whether the times of two runs can be compared."""
    return all(run.environment.get(name) == other.environment.get(name) for name in MACHINE)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _mean(run: RunRecord, column: str, scale: float = 1) -> float | None:
    known = [each for each in run.steps.get(column, ()) if each is not None]
    return scale * fmean(known) if known else None


def until_base(run: RunRecord, base: RunRecord, axis: str) -> float | None:
    """First evaluation from which test loss stays at or below base's final loss.

    Args:
        run: Any run.
        base: Base's run with the same seed.
        axis: A column of their curves: `step`, `seconds` or `epoch`.

    Returns:
        The share of base's total; None if the final loss is above base's.
    """
    losses, places = run.curves.get("test_loss"), run.curves.get(axis)
    theirs, whole = base.curves.get("test_loss"), base.curves.get(axis)
    if not (losses and places and theirs and whole) or theirs[-1] is None or not whole[-1]:
        return None
    since = None
    for loss, place in zip(losses, places, strict=True):
        if loss is None or loss > theirs[-1]:
            since = None
        elif since is None:
            since = place
    return None if since is None else float(since / whole[-1])


@dataclass(frozen=True)
class Group:
    """Runs with the same name and settings, by arm (base first) and sorted by seed."""

    title: str
    settings: dict[str, Any]
    arms: dict[str, list[RunRecord]]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs."""
        return [run for runs in self.arms.values() for run in runs]

    @property
    def language(self) -> bool:
        """Whether these are language models."""
        return self.settings.get("task") == "language"

    @cached_property
    def judged_by(self) -> str:
        """The metric that decides: accuracy (over several views, if evaluated), else loss."""
        known = (name for name in ("views_accuracy", "accuracy") if self.table[name].notna().any())
        return next(known, "loss")

    def about(self, metric: str) -> Metric:
        """How a metric is shown."""
        return HELD_OUT_LOSS if self.language and metric == "loss" else METRICS[metric]

    @property
    def focus(self) -> str | None:
        """The arm to judge: primum, else the first that is not base; None if there is none."""
        others = [arm for arm in self.arms if arm != "base"] if len(self.arms) > 1 else []
        return "primum" if "primum" in others else next(iter(others), None)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per finished run, indexed by arm and seed; one column per metric."""
        base = {run.seed: run for run in self.arms.get("base", ()) if run.complete}
        rows = [metrics_of(run, base.get(run.seed)) for run in self.runs if run.complete]
        index = pd.MultiIndex.from_tuples(
            [(run.arm, run.seed) for run in self.runs if run.complete], names=["arm", "seed"]
        )
        return pd.DataFrame(rows, index=index, columns=list(METRICS), dtype=float)

    def interval(self, arm: str, metric: str) -> Interval | None:
        """Mean over seeds with its interval; None if a finished run lacks the metric."""
        if arm not in self.table.index:
            return None
        values = self.table.loc[arm][metric]
        return None if values.isna().any() else interval(values.tolist())

    def pair(self, first: str, second: str, metric: str) -> tuple[list[float], list[float]] | None:
        """Values of two arms over their common seeds, in the same order; None without any.

        Also None if a run of a common seed diverged: without that seed the arm would look better
        than it is.
        """
        if not {first, second} <= set(self.table.index.get_level_values("arm")):
            return None
        both = [self.table.loc[arm][metric] for arm in (first, second)]
        joined = pd.concat(both, axis=1, join="inner").sort_index()
        if joined.empty or joined.isna().to_numpy().any():
            return None
        own, other = joined.T.to_numpy().tolist()
        return own, other

    def against_base(self, metric: str) -> dict[str, Difference]:
        """Each arm minus base; all of them are one family."""
        others = [arm for arm in self.arms if arm != "base"]
        return family({arm: self.pair(arm, "base", metric) for arm in others})

    def focus_against(self, metric: str) -> dict[str, Difference]:
        """The arm in focus minus each other arm except base; all of them are one family."""
        others = [arm for arm in self.arms if arm not in ("base", self.focus)]
        return family({arm: self.pair(self.focus or "", arm, metric) for arm in others})

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON: an interval per arm and metric, and the tests."""
        tests = {metric: self.against_base(metric) for metric in TESTED}
        others = {metric: self.focus_against(metric) for metric in TESTED}
        arms = []
        for arm, runs in self.arms.items():
            row: dict[str, Any] = {"arm": arm, "seeds": [run.seed for run in runs]}
            for metric in METRICS:
                found = self.interval(arm, metric)
                row[metric] = None if found is None else asdict(found)
            for metric in TESTED:
                for label, tested in ((f"{metric}_test", tests), (f"focus_{metric}_test", others)):
                    row[label] = asdict(tested[metric][arm]) if arm in tested[metric] else None
            arms.append(row)
        content = {"title": self.title, "settings": self.settings, "focus": self.focus}
        plain: dict[str, Any] = without_nan(content | {"arms": arms})
        return plain


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of the records; titles list settings that differ under the same name."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        key = json.dumps([record.name, record.settings], sort_keys=True, default=str)
        found.setdefault(key, []).append(record)
    groups = []
    for runs in found.values():
        first, order = runs[0], list(dict.fromkeys(run.arm for run in runs))
        order.sort(key=lambda arm: {"base": 0, "primum": 1}.get(arm, 2))
        namesakes = [each[0] for each in found.values() if each[0].name == first.name]
        arms = {
            arm: sorted((r for r in runs if r.arm == arm), key=lambda r: r.seed) for arm in order
        }
        groups.append(Group(first.name + _apart(first, namesakes), first.settings, arms))
    return groups


def _apart(run: RunRecord, namesakes: Sequence[RunRecord]) -> str:
    """The settings in which a run differs from others with the same name."""
    keys = [
        key
        for key in run.settings
        if any(other.settings.get(key) != run.settings[key] for other in namesakes)
    ]
    listed = ", ".join(f"{key} {run.settings[key]}" for key in keys)
    return f" ({listed})" if listed else ""


def moments_by_label(group: Group) -> dict[str, list[dict[str, Any]]]:
    """All whole-network measurements of a group's first arm, by label."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in next(iter(group.arms.values())):
        for moment in run.moments:
            found.setdefault(moment["label"], []).append(moment)
    return found


def of_weighting(moments: Sequence[Mapping[str, Any]], column: str, name: str) -> list[float]:
    """A column of the measurements' tables for one weighting, without missing values."""
    values = [m["table"][column][m["table"]["weights"].index(name)] for m in moments]
    return [value for value in values if value is not None and value == value]
