"""Table and plot of the study `common-shift`: what a step does to all samples, and the gain."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from lab.formatting import show
from lab.plots import error_bars
from lab.runs import RunRecord
from lab.statistics import Interval
from lab.study_results import Results, in_words
from lab.text_tables import markdown_table
from primum.diagnostics.figures.style import canvas, looks, styled

ARM = "primum@radius=0.4"
KINDS = {
    ("cnn-small", "group"): "small CNN, group norm",
    ("cnn-small", "batch"): "small CNN, batch norm",
    ("resnet20", "group"): "ResNet-20, group norm",
    ("resnet20", "batch"): "ResNet-20, batch norm",
    ("vit-micro", None): "transformer",
    ("cnn-whitened", None): "speedrun, batch norm",
}


class Shift(NamedTuple):
    """A measured setting, and what radius 0.4 gains in it."""

    run: RunRecord
    gain: Interval

    @property
    def share(self) -> float:
        """Of the change of the logits that all samples have in common."""
        found = self.run.final["common_shift"]
        return float("nan") if found is None else found


def shifts(results: Results) -> list[Shift]:
    """Settings with measurements and with two seeds or more of radius 0.4, largest share first."""
    tests = {
        in_words(row.group.settings): row.tests[ARM].interval
        for row in results.overview
        if ARM in row.tests
    }
    found = [
        Shift(run, tests[name])
        for run in results.runs["common-shift"]
        if (name := in_words(run.settings)) in tests and tests[name].count > 1
    ]
    return sorted(found, key=lambda each: -each.share)


def shift_table(results: Results) -> str:
    """One row per setting, and the rank correlation of share and gain."""
    rows, found = [], shifts(results)
    for each in found:
        harm, common, change = (
            f"{1000 * (each.run.final[name] or 0.0):.0f}"
            for name in ("real_harm", "common_harm", "real_change")
        )
        gain = f"{show(each.gain, 1, sign='+')} ({each.gain.count})"
        name = in_words(each.run.settings)
        rows.append([name, f"{100 * each.share:.0f}", harm, common, change, gain])
    head = ["setting", "common shift, %", "harm", "harm of the common shift", "loss, batch",
            "primum, radius 0.4 - base"]  # fmt: skip
    rank = spearmanr([each.share for each in found], [each.gain.mean for each in found])
    line = f"Spearman's rank correlation of the first and the last column: {rank.statistic:.2f}"
    return f"{markdown_table(head, rows)}\n\n{line} ({len(found)} settings)."


@styled
def shift_plot(results: Results) -> Figure:
    """Gain by the share of the common shift, one point per setting."""
    figure, axes = canvas(6.4, 3.8)
    found = shifts(results)
    for kind, look in looks(list(KINDS.values())).items():
        own = [each for each in found if _kind(each.run) == kind]
        if own:
            points = [(100 * each.share, each.gain) for each in own]
            error_bars(axes, points, look, kind, line=False)
    axes.axhline(0, color="#010203", linewidth=0.8)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of a step that moves all logits alike, %")
    axes.set_ylabel("points of test accuracy above base")
    axes.legend(loc="upper left")
    return figure


def _kind(run: RunRecord) -> str:
    return KINDS[run.settings["model"], run.settings["norm"]]
