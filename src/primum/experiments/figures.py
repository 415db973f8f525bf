"""The report's pictures, as SVG that lives inside the page and follows its colours."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from primum.experiments.statistics import interval
from primum.experiments.train import Run

# Okabe and Ito's palette, safe for colour-blind readers; dashes serve grey print.
COLOURS = {"base": "#0072B2", "primum": "#D55E00", "permuted": "#009E73", "lr-matched": "#CC79A7"}
DASHES = {"base": "-", "primum": "-", "permuted": "--", "lr-matched": ":"}
INK = "#010203"  # stands for the page's text colour
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "primum",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def curves(arms: dict[str, list[Run]], which: str) -> str:
    """Mean and 95% band over seeds; `which` is `test_loss`, `train_loss` or `test_accuracy`."""
    name = which.replace("_", " ")
    with rc_context(STYLE):
        figure, axes = _canvas()
        for arm, runs in arms.items():
            values = np.array([getattr(run, which) for run in runs])
            bands = [interval(list(column)) for column in values.T]
            epochs = np.arange(1, len(bands) + 1)
            axes.plot(epochs, [b.mean for b in bands], DASHES[arm], color=COLOURS[arm], label=arm)
            if len(runs) > 1:
                low, high = [b.low for b in bands], [b.high for b in bands]
                axes.fill_between(epochs, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.legend()
        return _svg(figure, f"{_title(arms)}: {name} by epoch, for {', '.join(arms)}")


def harmed_share(arms: dict[str, list[Run]]) -> str:
    """Share of a batch's samples whose loss a step raises, mean of each epoch's steps."""
    with rc_context(STYLE):
        figure, axes = _canvas()
        lines = [("base", "harmed_before", "base: plain step", "-")]
        if "primum" in arms:
            lines.append(("primum", "harmed_before", "primum: before, plain step", ":"))
            lines.append(("primum", "harmed_after", "primum: after, weighted step", "-"))
        for arm, figure_name, label, dashes in lines:
            runs = arms[arm]
            per_epoch = runs[0].settings.recipe.steps_per_epoch
            shares = np.array([getattr(run, figure_name) for run in runs]).mean(axis=0)
            means = 100 * shares.reshape(-1, per_epoch).mean(axis=1)
            steps = per_epoch * (np.arange(len(means)) + 0.5)
            axes.plot(steps, means, dashes, color=COLOURS[arm], label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("samples harmed, %")
        axes.legend()
        return _svg(figure, f"{_title(arms)}: share of harmed samples by step, before and after")


def one_batch(run: Run) -> str:
    """Each sample's first-order loss change by the plain step and with extra weights, sorted."""
    with rc_context(STYLE):
        figure, axes = _canvas()
        order = np.argsort(run.batch.before)
        before, after = np.array(run.batch.before)[order], np.array(run.batch.after)[order]
        samples = np.arange(1, len(order) + 1)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.vlines(samples, before, after, color=INK, linewidth=0.8, alpha=0.35)
        axes.plot(samples, before, "o", color=COLOURS["base"], markersize=4, label="plain step")
        axes.plot(samples, after, "D", color=COLOURS["primum"], markersize=3, label="with weights")
        axes.set_xlabel("samples of the batch, sorted")
        axes.set_ylabel("first-order loss change")
        axes.legend()
        title = run.settings.recipe.title
        return _svg(figure, f"{title}: each sample's loss change in one batch, before and after")


def _title(arms: dict[str, list[Run]]) -> str:
    return arms["base"][0].settings.recipe.title


def _canvas() -> tuple[Figure, Axes]:
    """Small, so that its text can still be read on a phone."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, label: str) -> str:
    """SVG to put inside HTML: the page's ink and font, names of its own, no outside links."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows the names by itself
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    own = re.sub(r"\W+", "-", label)  # several pictures share the page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # as wide as the page lets it be
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
