"""Plots of whole-network measurements: last layers, harm removed, first-order accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from primum.diagnostics.figures.style import INK, canvas, looks, styled

NAMES_UP_TO = 12  # with more layers, ticks are numbers
LOWEST = -1.0  # shares of harm removed below this are drawn at the edge


@styled
def error_by_depth(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Plot how well the last layers' Gram matrix approximates the whole (paper, Figure 1 top).

    Top: relative error of the partial sums from each layer to the last. Bottom: the best scale.
    Lines are medians over the measurements, bands span all of them. The head alone is on the right.

    Args:
        measured: name -> one or more `vars(by_depth(...))`, with `layers`, `error`, `scale`.
    """
    figure = canvas(5.2, 4.6)[0]
    figure.clear()
    above, below = figure.subplots(2, 1, sharex=True)
    for name, look in looks(list(measured)).items():
        for axes, column in ((above, "error"), (below, "scale")):
            values = np.array([np.asarray(each[column], dtype=float) for each in measured[name]])
            places = np.arange(values.shape[1])
            style: Any = {"color": look.colour, "marker": look.marker, "label": name}
            axes.plot(places, np.median(values, 0), look.dashes, markersize=3.5, **style)
            if len(values) > 1:
                ends = values.min(0), values.max(0)
                axes.fill_between(places, *ends, color=look.colour, alpha=0.15, linewidth=0)
    layers = [list(each[0]["layers"]) for each in measured.values()]
    longest = max(layers, key=len)
    if len(longest) <= NAMES_UP_TO and all(names == longest for names in layers):
        below.set_xticks(range(len(longest)), longest, rotation=30, ha="right")
        below.set_xlabel("from this layer to the last")
    else:
        below.set_xlabel("layers from this index to the last")
    above.set_ylim(0, 1.02)
    above.set_ylabel("relative error")
    if below.get_ylim()[1] > 20:
        below.set_yscale("log")
    below.set_ylabel("best scale")
    if any(measured):
        above.legend()
    return figure


@styled
def reor_by_weighting(measured: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Box plots of the share of the whole network's harm that weights remove, one dot per batch.

    1 is all of it; below 0, harm is added (paper, Figure 1 bottom).

    Args:
        measured: group (such as an optimizer or an epoch) -> weighting -> REOR of each batch.
    """
    groups = looks(list(measured))
    weightings = list(dict.fromkeys(key for each in measured.values() for key in each))
    figure, axes = canvas(5.2, 3.6)
    width = 0.8 / len(groups)
    for place, (group, look) in enumerate(groups.items()):
        centres = np.arange(len(weightings)) + (place - (len(groups) - 1) / 2) * width
        columns = [
            np.array([v for v in measured[group].get(key, ()) if v is not None], dtype=float)
            for key in weightings
        ]
        columns = [column[np.isfinite(column)] for column in columns]
        line = {"color": look.colour, "linewidth": 1.2}
        lines: Any = {f"{part}props": line for part in ("box", "whisker", "cap", "median")}
        axes.boxplot(
            columns,
            positions=centres,
            widths=0.7 * width,
            showfliers=False,
            manage_ticks=False,
            **lines,
        )
        for centre, column in zip(centres, columns, strict=True):
            spread = np.linspace(-0.22, 0.22, len(column)) * width if len(column) > 1 else 0.0
            inside = column >= LOWEST
            for values, marker in ((inside, look.marker), (~inside, 7)):  # 7: a caret down
                axes.plot(
                    (centre + spread + 0 * column)[values],
                    np.maximum(column, LOWEST)[values],
                    linestyle="none",
                    marker=marker,
                    color=look.colour,
                    markersize=3,
                    alpha=0.6,
                )
        if len(groups) > 1:
            axes.plot([], [], marker=look.marker, color=look.colour, linestyle="", label=group)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_ylim(top=1.02)
    axes.set_xticks(range(len(weightings)), weightings)
    axes.set_ylabel("share of harm removed (REOR)")
    if len(groups) > 1:
        axes.legend()
    return figure


@styled
def first_order_truth(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Plot how often the first-order loss change has the right sign, by learning rate.

    Args:
        measured: name -> one or more tables with `factor` (on the learning rate) and `sign_right`.
            Lines are means over them, bands span all of them.
    """
    figure, axes = canvas()
    for name, look in looks(list(measured)).items():
        factors = np.asarray(measured[name][0]["factor"], dtype=float)
        right = 100 * np.array([np.asarray(t["sign_right"], dtype=float) for t in measured[name]])
        style: Any = {"color": look.colour, "marker": look.marker, "label": name}
        axes.plot(factors, right.mean(0), look.dashes, **style)
        if len(right) > 1:
            ends = right.min(0), right.max(0)
            axes.fill_between(factors, *ends, color=look.colour, alpha=0.12, linewidth=0)
    axes.axhline(50, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [_factor(f) for f in factors])
    axes.set_ylim(0, 102)
    axes.set_xlabel("learning rate, relative to the run's")
    axes.set_ylabel("sign predicted correctly, %")
    if any(measured):
        axes.legend()
    return figure


def _factor(value: float) -> str:
    return f"1/{1 / value:g}" if value < 1 else f"{value:g}"
