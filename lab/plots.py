"""Plots of a group of runs, as SVG with captions: all for which the runs have data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import MaxNLocator

from lab.runs import RunRecord
from lab.statistics import Interval, interval
from lab.tables import Group, moments_by_label, of_weighting
from primum.diagnostics import figures
from primum.diagnostics.figures.style import Look, canvas, looks, styled

AXES = {"epoch": "epoch", "step": "step", "seconds": "seconds of training"}
CURVES = ("train_loss", "test_loss", "test_accuracy")
Arms = Mapping[str, Sequence[RunRecord]]


class Plot(NamedTuple):
    """SVG to embed in a page, and its caption."""

    svg: str
    caption: str


@styled
def curves(arms: Arms, which: str, *, by: str = "epoch", title: str = "") -> Figure:
    """Plot learning curves: mean and 95% band over seeds, one line per arm.

    An arm's line ends with its shortest run; rows without a value are left out.

    Args:
        arms: Runs by arm.
        which: Column of their curves: `test_loss`, `train_loss` or `test_accuracy`.
        by: `epoch`, `step`, or `seconds`, averaged over the seeds.
        title: Title of the plot.
    """
    figure, axes = canvas()
    scale = 100 if which == "test_accuracy" else 1
    for arm, style in looks(list(arms)).items():
        tables = [run.curves for run in arms[arm]]
        rows = [
            place
            for place in range(min(len(table[which]) for table in tables))
            if all(None not in (table[which][place], table[by][place]) for table in tables)
        ]
        places = [np.mean([table[by][place] for table in tables]) for place in rows]
        bands = [interval([scale * table[which][place] for table in tables]) for place in rows]
        means = np.array([band.mean for band in bands])
        line: Any = {"color": style.colour, "marker": style.marker, "markevery": 0.2}
        axes.plot(places, means, style.dashes, label=arm, **line)
        if len(tables) > 1:
            width = np.array([band.half_width for band in bands])
            axes.fill_between(
                places, means - width, means + width, color=style.colour, alpha=0.15, linewidth=0
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)
    axes.set_xlabel(AXES[by])
    axes.set_ylabel(which.replace("_", " ") + _unit(arms, which))
    axes.legend()
    return figure


def error_bars(
    axes: Axes,
    points: Sequence[tuple[float, Interval]],
    look: Look,
    label: str,
    *,
    line: bool = True,
) -> None:
    """Plot means by place with their 95% intervals, with a line through them or without."""
    axes.errorbar(
        [place for place, _ in points],
        [found.mean for _, found in points],
        yerr=np.nan_to_num([found.half_width for _, found in points]),
        color=look.colour,
        linestyle=look.dashes if line else "none",
        marker=look.marker,
        capsize=2,
        label=label,
    )


def log_axis(axes: Axes, values: Sequence[float], name: str) -> None:
    """Make the x-axis logarithmic, with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(name)


def group_plots(group: Group) -> Iterator[Plot]:
    """All plots of a group."""
    yield from _curves(group)
    yield from _interference(group)
    yield from _batch(group)
    yield from _network(group)
    yield from _protected(group)


def _curves(group: Group) -> Iterator[Plot]:
    """Losses and accuracy by step (or epoch, if steps are unknown), and test metrics by time."""
    for which in CURVES:
        arms = _having(group.arms, "curves", which)
        if not arms or max(len(run.curves[which]) for runs in arms.values() for run in runs) < 2:
            continue
        name = which.replace("_", " ")
        band = " Bands are 95% intervals over seeds." if _seeds(arms) > 1 else ""
        axes = ["step" if _having(arms, "curves", "step") == arms else "epoch"]
        if which.startswith("test") and _having(arms, "curves", "seconds") == arms:
            axes.append("seconds")
        for by in axes:
            caption = f"{name.capitalize()}" + (
                " over training time, without evaluation." if by == "seconds" else "."
            )
            label = f"{group.title}: {name} by {by}, for {', '.join(arms)}"
            yield Plot(figures.to_svg(curves(arms, which, by=by), label), caption + band)


def _interference(group: Group) -> Iterator[Plot]:
    """Share of harmed samples, extra weights, and the solver's gap."""
    title = group.title
    observed = _having(group.arms, "steps", "harmed_before", "harmed_after")
    if observed:
        kept = {a: runs for a, runs in observed.items() if a in ("base", "primum")} or observed
        drawn = figures.harmed_share(_steps(kept))
        yield Plot(
            figures.to_svg(drawn, f"{title}: share of harmed samples, for {', '.join(kept)}"),
            "Share of a batch harmed by the plain step and by the weighted one, measured in the "
            "head." + (" Bands span all seeds." if _seeds(kept) > 1 else ""),
        )
    weighted = _having(group.arms, "steps", "extra_weight_p50", "extra_weight_max")
    arm = "primum" if "primum" in weighted else next(iter(weighted), None)
    if arm is not None:
        applied = any(any(run.steps.get("applied", ())) for run in weighted[arm])
        drawn = figures.weight_bands(_steps(weighted)[arm], arm)
        yield Plot(
            figures.to_svg(drawn, f"{title}: extra weights of {arm}"),
            "Extra weights over the batch: median, 90th percentile, largest, and mean"
            + (", as applied." if applied else "; computed but not applied in this run."),
        )
    solved = _having(group.arms, "steps", "gap")
    if solved:
        yield Plot(
            figures.to_svg(figures.solver_gap(_steps(solved)), f"{title}: gap of the solver"),
            "Certified bound on how far the solver is from the optimum, as a share of the harm.",
        )


def _batch(group: Group) -> Iterator[Plot]:
    """One batch before and after, from primum if possible."""
    candidates = group.arms.get("primum", []) + group.arms.get("base", []) + group.runs
    run = next((run for run in candidates if run.batch is not None), None)
    if run is not None and run.batch is not None:
        drawn = figures.one_batch(run.batch["before"], run.batch["after"])
        yield Plot(
            figures.to_svg(drawn, f"{group.title}: loss changes in one batch, before and after"),
            f"One batch, step {run.batch['step']}, {run.arm}, seed {run.seed}, measured in the "
            "head: above zero, the step harms the sample.",
        )


def _network(group: Group) -> Iterator[Plot]:
    """Whole-network measurements: by depth, harm removed, one batch, first order and measured."""
    looked = moments_by_label(group)
    if not looked:
        return
    title, few, ends = group.title, _some(looked, 3), _some(looked, 2)
    yield Plot(
        figures.to_svg(figures.error_by_depth(few), f"{title}: error and scale by depth"),
        "How well the last layers approximate the whole network: relative error of their Gram "
        "matrix, and the scale at which it is smallest.",
    )
    reors = {
        label: {
            name: of_weighting(moments, "reor", name)
            for name in moments[0]["table"]["weights"]
            if name != "plain"
        }
        for label, moments in ends.items()
    }
    yield Plot(
        figures.to_svg(figures.reor_by_weighting(reors), f"{title}: harm removed by weighting"),
        "Share of the whole network's first-order harm removed by each weighting; below zero, "
        "harm is added.",
    )
    label, moments = list(looked.items())[-1]
    changes, real = moments[0].get("changes", {}), moments[0].get("real_changes", {})
    if {"plain", "head"} <= changes.keys():
        drawn = figures.one_batch(changes["plain"], changes["head"])
        yield Plot(
            figures.to_svg(drawn, f"{title}: one batch to first order, whole network"),
            f"One batch at {label}, whole network, to first order: the plain step, and with the "
            "head's weights.",
        )
    if "plain" in real:
        drawn = figures.one_batch(
            changes["plain"],
            real["plain"],
            labels=("first order", "measured"),
            change="loss change, plain step",
        )
        yield Plot(
            figures.to_svg(drawn, f"{title}: one batch, first order and measured changes"),
            "The same batch and the plain step: first-order prediction and measured change.",
        )
    by_lr = {label: [moment["by_lr"] for moment in found] for label, found in ends.items()}
    if all(tables[0]["factor"] for tables in by_lr.values()):
        yield Plot(
            figures.to_svg(figures.first_order_truth(by_lr), f"{title}: right signs by lr"),
            "How often first order predicts the right sign of a sample's loss change, by learning "
            "rate; dotted: chance.",
        )


def _protected(group: Group) -> Iterator[Plot]:
    """The samples with the most extra weight."""
    candidates = [*group.arms.get("primum", []), *group.runs]
    run = next((run for run in candidates if run.protected), None)
    if run is not None:
        yield Plot(
            figures.to_svg(
                protected_samples(run.protected),
                f"{group.title}: the samples with most extra weight",
            ),
            f"The samples with most extra weight, {run.arm}, seed {run.seed}: label, how often a "
            "plain step would have harmed it out of the times it was seen, sum of its extra "
            "weights.",
        )


def protected_samples(samples: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot `RunRecord.protected` as a grid."""
    return figures.sample_grid(
        [imread(io.BytesIO(base64.b64decode(each["png"]))) for each in samples],
        [
            f"{each['label']}\n{each['harmed']} of {each['seen']}, +{each['extra_weight']:.1f}"
            for each in samples
        ],
    )


def _unit(arms: Arms, which: str) -> str:
    if which == "test_accuracy":
        return ", %"
    text = any(run.settings.get("task") == "language" for runs in arms.values() for run in runs)
    return ", nats per token" if text else ""


def _some(looked: Mapping[str, list[dict[str, Any]]], count: int) -> dict[str, Any]:
    """The first, the last, and evenly spaced entries in between."""
    labels = list(looked)
    places = {round(k * (len(labels) - 1) / max(1, count - 1)) for k in range(count)}
    return {labels[place]: looked[labels[place]] for place in sorted(places)}


def _having(arms: Arms, table: str, *names: str) -> dict[str, list[RunRecord]]:
    """Arms whose runs all have values in these columns."""
    return {
        arm: list(runs)
        for arm, runs in arms.items()
        if all(
            any(v is not None for v in getattr(r, table).get(n, ())) for r in runs for n in names
        )
    }


def _steps(arms: Arms) -> dict[str, list[dict[str, list[Any]]]]:
    return {arm: [run.steps for run in runs] for arm, runs in arms.items()}


def _seeds(arms: Arms) -> int:
    return max(len(runs) for runs in arms.values())
