"""Table and plot of the study `parts`: weights on the head's gradient, the backbone's, or both."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from matplotlib.figure import Figure

from lab.formatting import show, show_mean, with_p
from lab.runs import RunRecord
from lab.tables import Group
from lab.text_tables import markdown_table
from primum.diagnostics.figures.style import looks, styled


def harm_by_epoch(runs: list[RunRecord]) -> list[float]:
    """Harm of the head's plain step by epoch, mean over seeds."""
    columns = [run.steps["harm_before"] for run in runs]
    return [fmean(values) for values in zip(*columns, strict=True)]


def parts_table(group: Group, names: Mapping[str, str]) -> str:
    """One row per arm: accuracy, and the harm in the head over the run."""
    tests, rows = group.against_base("accuracy"), []
    for arm, runs in group.arms.items():
        harm = harm_by_epoch(runs)
        rows.append([
            names.get(arm, arm), str(len(runs)), show(group.interval(arm, "accuracy"), 1),
            with_p(tests.get(arm)), f"{harm[0]:.2f}", f"{fmean(harm[-3:]):.2f}",
            show_mean(group.interval(arm, "extra_weight"), 2),
        ])  # fmt: skip
    head = ["weights", "seeds", "accuracy, %", "- base (Holm p)", "harm, first epoch",
            "last three", "extra"]  # fmt: skip
    return markdown_table(head, rows)


@styled
def parts_plot(group: Group, names: Mapping[str, str]) -> Figure:
    """Plot test accuracy and the head's harm by epoch, side by side."""
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, look in looks(list(group.arms)).items():
        runs = group.arms[arm]
        curves = [run.curves for run in runs]
        means = [100 * fmean(v) for v in zip(*(c["test_accuracy"] for c in curves), strict=True)]
        style = {"color": look.colour, "linestyle": look.dashes, "marker": look.marker}
        left.plot(curves[0]["epoch"], means, label=names.get(arm, arm), **style)
        harm = harm_by_epoch(runs)
        right.plot(range(1, len(harm) + 1), harm, **style)
    left.set_ylabel("test accuracy, %")
    right.set_ylabel("harm of the head's plain step")
    for axes in (left, right):
        axes.set_xlabel("epoch")
    figure.legend(loc="outside upper center", ncols=3)
    return figure
