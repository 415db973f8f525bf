"""Gain by budget: arms compared over complete schedules of several lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from lab.formatting import show, show_mean, with_p
from lab.plots import error_bars, log_axis
from lab.runs import RunRecord
from lab.statistics import Difference, Interval, family, interval, pooled
from lab.tables import Group, group_runs
from lab.text_tables import markdown_table
from primum.diagnostics.figures.style import LOOKS, styled

METRIC = "views_accuracy"
ENOUGH = 3  # seeds for an interval that is worth drawing
NOTE = (
    "Test accuracy over several views of each image, last epoch. Each budget is a complete "
    "schedule of that many epochs. Differences from base are in points, with Welch's 95% interval, "
    "Holm's p-value over the whole table, and the number of seeds. equal at: epochs of a schedule "
    "whose accuracy, interpolated over the logarithm of its length, is base's at the longest "
    "budget. time x: time per step relative to base. all: mean difference over the budgets, each "
    "counting alike, with its 95% interval, not corrected."
)

TARGET = (
    "Steps and seconds of training, in the longest schedule, to the lowest test accuracy that a "
    "run of base ends with: one view of each image, evaluated after every epoch."
)


class Budgets:
    """Runs of a speedrun by number of epochs; budgets without a run of base are left out."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        groups = [group for group in group_runs(records) if "base" in group.arms]
        self.groups: dict[int, Group] = {
            group.settings["epochs"]: group
            for group in sorted(groups, key=lambda group: group.settings["epochs"])
        }
        named = dict.fromkeys(run.arm for run in records)
        self.arms = ["base", *(arm for arm in named if arm != "base")]

    def tests(self) -> dict[tuple[str, int], Difference]:
        """Every arm minus base at every budget; all of them are one family."""
        pairs = {
            (arm, epochs): group.pair(arm, "base", METRIC)
            for arm in self.arms[1:]
            for epochs, group in self.groups.items()
        }
        return family(pairs)

    def means(self, arm: str) -> dict[int, float]:
        """Mean accuracy by budget, over the seeds that base also has."""
        found = {}
        for epochs, group in self.groups.items():
            pair = group.pair(arm, "base", METRIC)
            if pair is not None:
                found[epochs] = interval(pair[0]).mean
        return found

    def overall(self, arm: str) -> Interval | None:
        """Mean difference from base over all budgets; None if the arm lacks one of them."""
        pairs = [group.pair(arm, "base", METRIC) for group in self.groups.values()]
        known = [pair for pair in pairs if pair is not None]
        return pooled(known) if arm != "base" and len(known) == len(pairs) else None

    def equal_at(self, arm: str) -> float | None:
        """Epochs at which an arm reaches base's accuracy of the longest budget; None if never."""
        base, own = self.means("base"), self.means(arm)
        return None if not base or max(base) not in own else crossing(own, base[max(base)])

    def table(self, names: Mapping[str, str] | None = None) -> str:
        """One row per arm, one column per budget, as Markdown."""
        tests, rows = self.tests(), []
        for arm in self.arms:
            row = [(names or {}).get(arm, arm)]
            for epochs, group in self.groups.items():
                if arm == "base":
                    own = group.interval(arm, METRIC)
                    row.append(f"{show(own, 2)} [{len(group.arms[arm])}]")
                else:
                    test = tests.get((arm, epochs))
                    shown = with_p(test, 2)
                    row.append(shown if test is None else f"{shown} [{test.interval.count}]")
            row.append(show(self.overall(arm), 2, sign="+"))
            equal = self.equal_at(arm)
            row.append("–" if equal is None else f"{equal:.1f}")
            row.append(show_mean(self._time(arm), 2))
            rows.append(row)
        head = ["", *(f"{epochs} epochs" for epochs in self.groups), "all", "equal at", "time x"]
        return markdown_table(head, rows)

    def to_target(self, names: Mapping[str, str] | None = None) -> str:
        """Steps and seconds to the lowest final test accuracy of base, at the longest budget.

        A run reaches it at the first evaluation from which its accuracy stays at or above it.
        """
        group, rows = self.groups[max(self.groups)], []
        ends = [run.final["test_accuracy"] for run in group.arms["base"]]
        target = min(end for end in ends if end is not None)
        for arm, runs in group.arms.items():
            found = [each for run in runs if (each := reached(run, target)) is not None]
            steps = interval([step for step, _ in found]) if found else None
            times = interval([seconds for _, seconds in found]) if found else None
            row = [(names or {}).get(arm, arm), f"{len(found)} of {len(runs)}"]
            rows.append([*row, show(steps, 0), show(times, 0)])
        head = ["", f"runs that reach {100 * target:.2f}%", "steps", "seconds"]
        return markdown_table(head, rows)

    def _time(self, arm: str) -> Interval | None:
        found = [
            each for group in self.groups.values() if (each := group.interval(arm, "time_ratio"))
        ]
        return interval([each.mean for each in found]) if found else None

    @styled
    def plot(self, names: Mapping[str, str] | None = None) -> Figure:
        """Plot points above base by budget, with intervals, in one panel per arm.

        Budgets with fewer than three seeds of an arm (or than base has) are left out, and so are
        arms that lack most budgets.
        """
        drawn: dict[str, dict[int, Interval]] = {}
        for (arm, epochs), test in self.tests().items():
            if test.interval.count >= min(ENOUGH, len(self.groups[epochs].arms["base"])):
                drawn.setdefault(arm, {})[epochs] = test.interval
        drawn = {arm: found for arm, found in drawn.items() if 2 * len(found) > len(self.groups)}
        columns = min(3, len(drawn)) or 1
        rows = math.ceil(len(drawn) / columns) or 1
        figure = Figure(figsize=(7.2, 0.7 + 1.7 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        for axes, (arm, found) in zip(panels, drawn.items(), strict=False):
            axes.axhline(0, color="#010203", linewidth=0.8)
            error_bars(axes, list(found.items()), LOOKS[0], arm)
            log_axis(axes, list(self.groups), "")
            axes.set_title((names or {}).get(arm, arm))
        for axes in panels[len(drawn) :]:
            axes.set_axis_off()
        ends = [group.interval("base", METRIC) for group in self.groups.values()]
        base = ", ".join(show_mean(end, 1) for end in ends)
        figure.supxlabel(f"epochs of the schedule; base has {base}%")
        figure.supylabel("points above base")
        return figure


def crossing(curve: Mapping[int, float], target: float) -> float | None:
    """First length at which a curve reaches a target, interpolated over the log of the length."""
    points = sorted(curve.items())
    if points and points[0][1] >= target:
        return float(points[0][0])
    for (low, before), (high, after) in pairwise(points):
        if before < target <= after:
            share = (target - before) / (after - before)
            return math.exp(math.log(low) + share * math.log(high / low))
    return None


def reached(run: RunRecord, target: float) -> tuple[int, float] | None:
    """Step and seconds of training from which test accuracy stays at or above a target."""
    since = None
    columns = ("test_accuracy", "step", "seconds")
    for accuracy, step, seconds in zip(*(run.curves[name] for name in columns), strict=True):
        if accuracy is None or accuracy < target:
            since = None
        elif since is None:
            since = (step, seconds)
    return since


def tuning_table(groups: Sequence[Group], chosen: Sequence[Group]) -> str:
    """Base's accuracy by budget, learning rate and weight decay; those of `chosen` are marked."""
    names = ("epochs", "lr", "weight_decay")
    rows = []
    for group in sorted(groups, key=lambda group: [group.settings[name] for name in names]):
        epochs, lr, decay = (group.settings[name] for name in names)
        used = any(
            epochs == other["epochs"]
            and math.isclose(lr, other["lr"])
            and math.isclose(decay, other["weight_decay"])
            for other in (group.settings for group in chosen)
        )
        accuracy = show(group.interval("base", "accuracy"), 2)
        rows.append([str(epochs), f"{lr:.3g}", f"{decay:.2g}", accuracy, "used" if used else ""])
    return markdown_table(["epochs", "learning rate", "weight decay", "base, %", ""], rows)
