"""Plots over a training run, from tables as returned by `InterferenceMeter.table()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from primum.diagnostics.figures.style import canvas, looks, styled

Table = Mapping[str, Sequence[Any]]
Tables = Mapping[str, Sequence[Table]]
Array = NDArray[np.float64]

STRETCHES = 60  # intervals of steps to average over; thousands of points are unreadable
SMALLEST_GAP = 1e-7  # smaller gaps are rounding noise


@styled
def harmed_share(runs: Tables, *, by: str = "step", title: str = "") -> Figure:
    """Plot the share of each batch whose loss the step raises, plain (solid) and weighted (dotted).

    The dotted line is drawn if weights were applied, or if there is no column `applied`.

    Args:
        runs: name -> tables of one or more seeds: `step`, `harmed_before`, `harmed_after`.
            Lines are means over seeds and intervals of steps, bands span all seeds.
        by: Column for the x-axis.
        title: Title of the plot.
    """
    figure, axes = canvas()
    for name, look in looks(list(runs)).items():
        tables = runs[name]
        lines = [("harmed_before", "-", "plain")]
        if all(any(table.get("applied", [True])) for table in tables):
            lines.append(("harmed_after", ":", "weighted"))
        for column, dashes, what in lines:
            steps, shares = _each_seed(tables, column, by)
            style: Any = {"color": look.colour, "marker": look.marker, "markevery": 0.15}
            axes.plot(steps, shares.mean(0), dashes, label=_label(name, what), **style)
            if len(shares) > 1:
                ends = shares.min(0), shares.max(0)
                axes.fill_between(steps, *ends, color=look.colour, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    _finish(axes, "samples harmed, %", by)
    return figure


@styled
def solver_gap(runs: Tables) -> Figure:
    """Plot the solver's certified distance to the optimum, relative to the harm, on a log scale.

    Median (solid) and maximum (dotted) over all seeds in each interval of steps.
    """
    figure, axes = canvas()
    axes.set_yscale("log")
    axes.set_autoscaley_on(False)  # autoscaling fails if all gaps are equal
    seen: list[float] = []
    for name, look in looks(list(runs)).items():
        steps, parts = _stretches(runs[name], "gap")
        gaps = [np.maximum(part, SMALLEST_GAP) for part in parts]
        middle = [100 * float(np.median(gap)) for gap in gaps]
        largest = [100 * float(gap.max()) for gap in gaps]
        axes.plot(steps, middle, "-", color=look.colour, label=_label(name, "median"))
        axes.plot(steps, largest, ":", color=look.colour, label=_label(name, "largest"))
        seen += middle + largest
    axes.set_ylim(min(seen) / 2, 2 * max(seen))
    _finish(axes, "certified gap, % of the harm")
    return figure


@styled
def weight_bands(tables: Sequence[Table], name: str = "primum") -> Figure:
    """Plot the distribution of extra weights in the batch by step: median, mean, p90, maximum."""
    figure, axes = canvas()
    look = looks([name])[name]
    columns = ("extra_weight_p50", "extra_weight_p90", "extra_weight_max")
    lines = []
    for column in columns:
        steps, parts = _stretches(tables, column)
        lines.append(np.array([part.mean() for part in parts]))
    shades = (0.35, 0.15)
    texts = ("50th to 90th percentile", "90th percentile to maximum")
    for low, high, shade, text in zip(lines, lines[1:], shades, texts, strict=False):
        axes.fill_between(steps, low, high, color=look.colour, alpha=shade, linewidth=0, label=text)
    for line, dashes in zip(lines, ("-", "--", ":"), strict=True):
        axes.plot(steps, line, dashes, color=look.colour, linewidth=1.2)
    steps, parts = _stretches(tables, "mean_extra_weight")
    means = [part.mean() for part in parts]
    axes.plot(steps, means, "-", color="#009E73", linewidth=1.8, label="mean")
    axes.set_ylim(0, 1.35 * max(0.01, lines[-1].max()))  # room for the legend
    _finish(axes, "extra weight")
    return figure


def _each_seed(tables: Sequence[Table], column: str, by: str) -> tuple[Array, Array]:
    """Interval centres, and each seed's means in percent; as long as the shortest run."""
    lines = []
    for table in tables:
        steps, parts = _stretches([table], column, by)
        lines.append([100 * part.mean() for part in parts])
    shortest = min(len(line) for line in lines)
    return steps[:shortest], np.array([line[:shortest] for line in lines])


def _stretches(tables: Sequence[Table], column: str, by: str = "step") -> tuple[Array, list[Array]]:
    """Centre and finite values of each interval of steps; intervals without any are left out."""
    values = [
        np.array([np.nan if v is None else v for v in table[column]], dtype=float)
        for table in tables
    ]
    count = min(len(value) for value in values)
    steps = np.array(tables[0][by][:count], dtype=float)
    places = np.array_split(np.arange(count), min(STRETCHES, count))
    middles, parts = [], []
    for place in places:
        together = np.concatenate([value[place] for value in values])
        together = together[np.isfinite(together)]
        if len(together):
            middles.append(steps[place].mean())
            parts.append(together)
    return np.array(middles), parts


def _label(name: str, what: str) -> str:
    return f"{name}: {what}" if name else what


def _finish(axes: Axes, ylabel: str, by: str = "step") -> None:
    axes.set_xlim(left=0)
    axes.set_xlabel(by)
    axes.set_ylabel(ylabel)
    axes.legend()
