"""Pictures of docs/results.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from studies import named

from primum.diagnostics.figures.style import canvas, looks, styled
from primum.experiments.figures import curves
from primum.experiments.report.groups import Group, accuracy, group_runs
from primum.experiments.statistics import Difference, interval
from primum.experiments.sweeps.settings import OPTIMIZERS

if TYPE_CHECKING:
    from studies_page import Results

MAIN = ["base", "paper", "primum", "primum@radius=0.4"]
Rows = list[tuple[str, Group, dict[str, Difference]]]  # settings with their differences


def pictures(results: Results, overview: Rows) -> dict[str, Figure]:
    """By the end of their file names."""
    drawn = {"overview": forest(overview)}
    for optimizer, name in OPTIMIZERS.items():
        for study, draw in (("rates", rates), ("long", long), ("controls", over_time)):
            if results.records.get(f"{study}-{optimizer}"):
                drawn[f"{study}-{optimizer}"] = draw(
                    group_runs(results.of(f"{study}-{optimizer}")), name
                )
    return drawn


@styled
def forest(rows: Rows) -> Figure:
    """Differences from base with their intervals, a line for each setting."""
    figure, axes = canvas(8.2, 0.9 + 0.42 * len(rows))
    look = looks(MAIN)
    for place, (_, _, changes) in enumerate(rows):
        for number, arm in enumerate(MAIN[1:]):
            if arm not in changes:
                continue
            found = changes[arm].welch
            axes.errorbar(
                found.mean,
                -place + 0.22 * (1 - number),
                xerr=found.half_width,
                color=look[arm].colour,
                marker=look[arm].marker,
                capsize=2,
                linewidth=1.2,
            )
    axes.axvline(0, color="#010203", linewidth=0.8)
    axes.set_yticks([-place for place in range(len(rows))], [name for name, _, _ in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0, labelsize=8)
    for place in range(len(rows) - 1):
        axes.axhline(-place - 0.5, color="#999999", linewidth=0.3)
    axes.set_xlabel("points of test accuracy above base")
    handles = [
        Line2D([], [], color=look[arm].colour, marker=look[arm].marker, label=named(arm))
        for arm in MAIN[1:]
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return figure


@styled
def rates(groups: list[Group], title: str) -> Figure:
    """Accuracy by learning rate."""
    figure, axes = canvas()
    groups = sorted(groups, key=lambda group: group.settings["lr"])
    for number, (arm, look) in enumerate(looks(MAIN).items()):
        known = [group for group in groups if arm in group.arms]
        if not known:
            continue
        found = [interval([accuracy(run) for run in group.arms[arm]]) for group in known]
        axes.errorbar(
            [group.settings["lr"] * 1.03 ** (number - 1.5) for group in known],  # side by side
            [each.mean for each in found],
            yerr=np.nan_to_num([each.half_width for each in found]),
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            capsize=2,
            label=named(arm),
        )
    axes.set_xscale("log", base=2)
    lrs = [group.settings["lr"] for group in groups]
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.legend()
    return figure


def long(groups: list[Group], title: str) -> Figure:
    """Accuracy over a long schedule."""
    (group,) = groups
    return curves({named(a): runs for a, runs in group.arms.items()}, "test_accuracy", title=title)


def over_time(groups: list[Group], title: str) -> Figure:
    """Accuracy over seconds, recipes only."""
    (group,) = groups
    chosen = {named(arm): group.arms[arm] for arm in MAIN if arm in group.arms}
    return curves(chosen, "test_accuracy", by="seconds", title=title)
