"""Plots of docs/results.md."""

from __future__ import annotations

import math

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.budgets import Budgets
from lab.defaults import OPTIMIZERS
from lab.parts_page import parts_plot
from lab.plots import curves, error_bars, log_axis
from lab.shift_page import shift_plot
from lab.study_results import MAIN as SHOWN
from lab.study_results import NAMES, Results, Row, in_short, named
from lab.tables import Group
from primum.diagnostics.figures.style import canvas, looks, styled

MAIN = ["base", "paper", "primum", "primum@radius=0.4"]
FOREST = [*MAIN, "primum@radius=0.1"]


def results_plots(results: Results) -> dict[str, Figure]:
    """Plots by file name."""
    short = [row for row in results.overview if not row.tuned]
    tuned = [row for row in results.overview if row.tuned and _in_overview(row.group)]
    drawn = {"results-overview": forest(tuned), "results-overview-short": forest(short)}
    if results.runs.get("speedrun"):
        drawn["results-speedrun"] = Budgets(results.runs["speedrun"]).plot(NAMES)
    if results.runs.get("common-shift"):
        drawn["results-common-shift"] = shift_plot(results)
    if results.runs.get("parts"):
        (group,) = results.groups("parts")
        drawn["results-parts"] = parts_plot(group, NAMES)
    if results.runs.get("long-sgd"):
        (group,) = results.groups("long-sgd")
        arms = {named(arm): runs for arm, runs in group.arms.items()}
        drawn["results-long-sgd"] = curves(arms, "test_accuracy", title=OPTIMIZERS["sgd"])
    for optimizer, title in OPTIMIZERS.items():
        if results.runs.get(f"rates-{optimizer}"):
            drawn[f"results-rates-{optimizer}"] = rates(results.groups(f"rates-{optimizer}"), title)
        if results.runs.get(f"controls-{optimizer}"):
            (group,) = results.groups(f"controls-{optimizer}")
            arms = {named(arm): group.arms[arm] for arm in MAIN if arm in group.arms}
            drawn[f"results-controls-{optimizer}"] = curves(
                arms, "test_accuracy", by="seconds", title=title
            )
    return drawn


def _in_overview(group: Group) -> bool:
    """Whether the overview shows a setting; of the speedrun's lengths, the powers of two."""
    settings = group.settings
    return settings["model"] != "cnn-whitened" or math.log2(settings["epochs"]).is_integer()


@styled
def forest(rows: list[Row]) -> Figure:
    """Differences from base with their intervals, one line per setting."""
    figure, axes = canvas(7.2, 0.9 + 0.46 * len(rows))
    look = looks(FOREST)
    for place, row in enumerate(rows):
        for number, arm in enumerate(SHOWN):
            if arm in row.tests:
                found = row.tests[arm].interval
                axes.errorbar(
                    found.mean,
                    -place + 0.2 * (1.5 - number),
                    xerr=found.half_width,
                    color=look[arm].colour,
                    marker=look[arm].marker,
                    capsize=2,
                    linewidth=1.2,
                )
    axes.axvline(0, color="#010203", linewidth=0.8)
    short = [in_short(row.group.settings) for row in rows]
    names = []
    for name, row in zip(short, rows, strict=True):
        rate = f", lr {row.group.settings['lr']:g}" if short.count(name) > 1 else ""
        end = row.group.interval("base", row.group.judged_by)
        names.append(name + rate + ("" if end is None else f": {end.mean:.0f}%"))
    axes.set_yticks([-place for place in range(len(rows))], names)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0, labelsize=9)
    for place in range(len(rows) - 1):
        axes.axhline(-place - 0.5, color="#999999", linewidth=0.3)
    axes.set_xlabel("points of test accuracy above base")
    handles: list[Artist] = [
        Line2D([], [], color=look[arm].colour, marker=look[arm].marker, label=named(arm))
        for arm in SHOWN
        if any(arm in row.tests for row in rows)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=4)
    return figure


@styled
def rates(groups: list[Group], title: str) -> Figure:
    """Plot accuracy or loss by learning rate."""
    figure, axes = canvas()
    groups = sorted(groups, key=lambda group: group.settings["lr"])
    metric = groups[0].judged_by
    for number, (arm, look) in enumerate(looks(MAIN).items()):
        known = [(g.settings["lr"], found) for g in groups if (found := g.interval(arm, metric))]
        if known:
            apart = [(lr * 1.03 ** (number - 1.5), found) for lr, found in known]  # side by side
            error_bars(axes, apart, look, named(arm, language=groups[0].language))
    log_axis(axes, [group.settings["lr"] for group in groups], "learning rate")
    axes.set_ylabel(groups[0].about(metric).heading)
    axes.set_title(title)
    axes.legend()
    return figure
