"""Pictures like the paper's Figure 2 and appendix G: how the solvers fare over training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import write_text
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
# Okabe and Ito's palette, safe for colour-blind readers; markers and dashes serve grey print.
LOOKS: dict[str, dict[str, Any]] = {
    "optimum": {"color": "black", "marker": "_", "markersize": 9, "linestyle": "none"},
    "paper": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "primum 20": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "primum 50": {"color": "#56B4E9", "marker": "^", "linestyle": ":"},
}


def over_training(columns: Sequence[tuple[str, list[dict[str, Any]]]], path: Path) -> None:
    """PNG and SVG: harm removed above, iterations below, one column per title and its problems."""
    with rc_context(STYLE):
        size = (2.0 + 1.9 * len(columns), 4.6)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
        for column, (title, problems) in enumerate(columns):
            _removed(axes[0][column], problems)
            _iterations(axes[1][column], problems)
            axes[0][column].set_title(title)
            axes[1][column].set_xlabel("step")
        axes[0][0].set_ylabel("harm removed, %")
        axes[0][0].set_ylim(0, 100)
        axes[1][0].set_ylabel("iterations")
        axes[1][0].set_ylim(0, 54)
        for row in axes:
            for each in row:
                each.grid(axis="y", color="0.9", linewidth=0.6)
                each.set_axisbelow(True)
        entries: dict[str, Any] = {}
        for each in axes.flat:
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=min(4, len(columns))
        )
        _save(figure, path)


def _line(axes: Axes, points: Sequence[tuple[int, float]], look: str, label: str) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=label, **LOOKS[look])


def _removed(axes: Axes, problems: list[dict[str, Any]]) -> None:
    """What each solver removes while it stays inside the paper's trust region."""
    for arm, look, label in (
        ("paper 50", "paper", "paper's recipe, at most 50 iterations"),
        ("primum 50", "primum 50", "primum, 50 iterations"),
        ("primum 20", "primum 20", "primum, 20 iterations"),
    ):
        points = [(p["step"], 100 * p["arms"][arm]["removed_inside"]) for p in problems]
        _line(axes, points, look, label)
    best = [(p["step"], 100 * p["optimum"]) for p in problems if p["optimum"] is not None]
    _line(axes, best, "optimum", "optimum of the paper's problem")


def _iterations(axes: Axes, problems: list[dict[str, Any]]) -> None:
    paper = [(p["step"], p["arms"]["paper 50"]["iterations"]) for p in problems]
    _line(axes, paper, "paper", "paper's recipe, at most 50 iterations")
    proven = [(p["step"], p["iterations_to_gap"]) for p in problems]
    look = LOOKS["primum 20"] | {"fillstyle": "none"}
    steps, counts = zip(*proven, strict=True)
    axes.plot(steps, counts, label="primum, until 1% is proven", **look)
    axes.axhline(20, color=look["color"], linewidth=0.8, alpha=0.6)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None})
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date")))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    write_text(path.with_suffix(".svg"), "\n".join(lines) + "\n")
