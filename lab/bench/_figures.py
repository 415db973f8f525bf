"""Plots like the paper's Figure 2 and appendix G: the solvers over the course of training."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.files import write_text

NAMES = {"sgd": "SGD, group-norm CNN", "adamw": "AdamW, transformer"}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "primum",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}
# Okabe and Ito's palette, safe for colour-blind readers; markers and dashes for print in grey.
LOOKS: dict[str, dict[str, Any]] = {
    "optimum": {"color": "black", "marker": "_", "markersize": 9, "linestyle": "none"},
    "paper": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "primum": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "proven": {"color": "#0072B2", "marker": "o", "linestyle": ":", "fillstyle": "none"},
}
PAPER, OURS = "paper's recipe, at most 50 iterations", "primum, 20 iterations"


def over_training(columns: Sequence[tuple[str, list[dict[str, Any]]]], path: Path) -> None:
    """Save harm removed (above) and iterations (below) as PNG and SVG, one column per title."""
    with rc_context(STYLE):
        size = (6.5 if len(columns) < 4 else 2 * len(columns), 4.6)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
        for column, (title, problems) in enumerate(columns):
            _removed(axes[0][column], problems)
            _iterations(axes[1][column], problems)
            axes[0][column].set_title(title)
            axes[1][column].set_xlabel("step")
        axes[0][0].set_ylabel("harm removed, %")
        axes[0][0].set_ylim(min(0.0, axes[0][0].get_ylim()[0]), 104)
        axes[1][0].set_ylabel("iterations")
        axes[1][0].set_ylim(0, 54)
        for row in axes:
            for each in row:
                each.axhline(0, color="0.4", linewidth=0.6)
                each.grid(axis="y", color="0.9", linewidth=0.6)
                each.set_axisbelow(True)
        entries: dict[str, Any] = {}
        for each in axes.flat:
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2)
        _save(figure, path)


def _line(axes: Axes, points: Sequence[tuple[int, float]], look: str, label: str) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=label, **LOOKS[look])


def _removed(axes: Axes, problems: list[dict[str, Any]]) -> None:
    """Harm that each solver removes inside the paper's trust region."""
    for arm, look, label in (("paper 50", "paper", PAPER), ("primum 20", "primum", OURS)):
        points = [(p["step"], 100 * p["arms"][arm]["removed_inside"]) for p in problems]
        _line(axes, points, look, label)
    best = [(p["step"], 100 * p["optimum"]) for p in problems if p["optimum"] is not None]
    _line(axes, best, "optimum", "optimum of the paper's problem")


def _iterations(axes: Axes, problems: list[dict[str, Any]]) -> None:
    """Iterations of the paper's solver, of ours (always 20), and those ours needs to prove 1%."""
    paper = [(p["step"], p["arms"]["paper 50"]["iterations"]) for p in problems]
    _line(axes, paper, "paper", PAPER)
    _line(
        axes, [(p["step"], p["arms"]["primum 20"]["iterations"]) for p in problems], "primum", OURS
    )
    proven = [(p["step"], p["iterations_to_gap"] or math.nan) for p in problems]
    _line(axes, proven, "proven", "primum, until it is proven within 1%")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None})
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date")))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    write_text(path.with_suffix(".svg"), "\n".join(lines) + "\n")
