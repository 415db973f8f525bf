"""What can be drawn from a group of runs: every picture for which the runs have the data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.image import imread

from primum.diagnostics import figures
from primum.experiments.figures import curves
from primum.experiments.report.groups import Group, moments_by_label
from primum.experiments.report.parts import Picture
from primum.experiments.runs import RunRecord

CURVES = {
    "train_loss": "Training loss.",
    "test_loss": "Test loss.",
    "test_accuracy": "Test accuracy.",
}
Arms = Mapping[str, Sequence[RunRecord]]
Looked = Mapping[str, Sequence[dict[str, Any]]]


def training_pictures(group: Group) -> Iterator[Picture]:
    """Curves, share of harmed samples, weights, the solver's gap."""
    title = group.title
    yield from _curves(group)
    watched = _with_column(group.arms, "steps", "harmed_before", "harmed_after")
    if watched:
        kept = {arm: runs for arm, runs in watched.items() if arm in ("base", "primum")} or watched
        drawn = figures.harmed_share(_tables(kept))
        label = f"{title}: share of harmed samples by step, for {', '.join(kept)}"
        yield Picture(
            figures.to_svg(drawn, label),
            "Share of a batch harmed by the plain step and by the weighted one, seen through the "
            "head." + (" Bands reach over all seeds." if _seeds(kept) > 1 else ""),
        )
    weighed = _with_column(group.arms, "steps", "extra_weight_p50", "extra_weight_max")
    arm = "primum" if "primum" in weighed else next(iter(weighed), None)
    if arm is not None:
        applied = any(any(run.steps.get("applied", ())) for run in weighed[arm])
        drawn = figures.weight_bands(_tables(weighed)[arm], arm)
        yield Picture(
            figures.to_svg(drawn, f"{title}: extra weights of {arm} by step, as bands"),
            "Extra weights over the batch: median, nine tenths, largest, and their mean"
            + (", as applied." if applied else "; not applied in this run, only computed."),
        )
    solved = _with_column(group.arms, "steps", "gap")
    if solved:
        yield Picture(
            figures.to_svg(
                figures.solver_gap(_tables(solved)), f"{title}: certified gap of the solver by step"
            ),
            "How far from the best answer the solver can be at most, as a share of the harm.",
        )


def _curves(group: Group) -> Iterator[Picture]:
    """Losses and accuracy by step, or by epoch where steps are unknown; test figures by time."""
    for which, text in CURVES.items():
        arms = _with_column(group.arms, "curves", which)
        if not arms or max(len(run.curves[which]) for runs in arms.values() for run in runs) < 2:
            continue
        band = " Bands are 95% intervals over seeds." if _seeds(arms) > 1 else ""
        axes = ["step" if _with_column(arms, "curves", "step") == arms else "epoch"]
        if which.startswith("test") and _with_column(arms, "curves", "seconds") == arms:
            axes.append("seconds")
        for by in axes:
            label = f"{group.title}: {which.replace('_', ' ')} by {by}, for {', '.join(arms)}"
            told = text if by != "seconds" else f"{text[:-1]} over time, without that of testing."
            yield Picture(figures.to_svg(curves(arms, which, by=by), label), told + band)


def batch_picture(group: Group) -> Iterator[Picture]:
    """One batch before and after, of the arm in focus."""
    candidates = group.arms.get("primum", []) + group.arms.get("base", []) + group.runs
    run = next((run for run in candidates if run.batch is not None), None)
    if run is not None and run.batch is not None:
        drawn = figures.one_batch(run.batch["before"], run.batch["after"])
        yield Picture(
            figures.to_svg(drawn, f"{group.title}: loss changes in one batch, before and after"),
            f"One batch, step {run.batch['step']}, {run.arm}, seed {run.seed}, seen through the "
            "head: above zero, the step harms the sample.",
        )


def network_pictures(group: Group) -> Iterator[Picture]:
    """The whole network at several moments: depth, REOR, one batch, first order and truth."""
    looked = moments_by_label(group)
    if not looked:
        return
    title, few = group.title, _ends(looked, 3)
    ends = _ends(looked, 2)
    yield Picture(
        figures.to_svg(figures.error_by_depth(few), f"{title}: error and scale by depth"),
        "How well the last layers stand for all: relative error of their Gram matrix, and the "
        "scale that brings it closest.",
    )
    reors = {
        label: {
            name: [m["table"]["reor"][m["table"]["weights"].index(name)] for m in looks]
            for name in looks[0]["table"]["weights"]
            if name != "plain"
        }
        for label, looks in ends.items()
    }
    yield Picture(
        figures.to_svg(figures.reor_by_weighting(reors), f"{title}: harm removed by weighting"),
        "Share of the whole network's first-order harm removed by each weighting; below zero there "
        "is more than before.",
    )
    label, looks = list(looked.items())[-1]
    last = looks[0]
    if {"plain", "head"} <= last.get("changes", {}).keys():
        drawn = figures.one_batch(last["changes"]["plain"], last["changes"]["head"])
        yield Picture(
            figures.to_svg(drawn, f"{title}: one batch to first order, whole network"),
            f"One batch at {label}, whole network, to first order: plain step, and with the head's "
            "weights.",
        )
    if "plain" in last.get("real_changes", {}):
        drawn = figures.one_batch(
            last["changes"]["plain"],
            last["real_changes"]["plain"],
            labels=("first order", "measured"),
            change="loss change, plain step",
        )
        yield Picture(
            figures.to_svg(drawn, f"{title}: one batch, first order and measured changes"),
            "The same batch and the plain step: what first order says, and what the losses do.",
        )
    by_lr = {label: [moment["by_lr"] for moment in looks] for label, looks in ends.items()}
    if all(tables[0]["factor"] for tables in by_lr.values()):
        yield Picture(
            figures.to_svg(figures.first_order_truth(by_lr), f"{title}: signs told rightly by lr"),
            "How often first order tells rightly whether a sample's loss rises, at several "
            "learning rates; dotted: a coin.",
        )


def protected_picture(group: Group) -> Iterator[Picture]:
    """Samples with most extra weight, of the arm in focus."""
    candidates = [*group.arms.get("primum", []), *group.runs]
    run = next((run for run in candidates if run.protected), None)
    if run is None:
        return
    images = [imread(io.BytesIO(base64.b64decode(each["png"]))) for each in run.protected]
    captions = [
        f"{each['label']}\n{each['harmed']} of {each['seen']}, +{each['extra_weight']:.1f}"
        for each in run.protected
    ]
    drawn = figures.sample_grid(images, captions)
    yield Picture(
        figures.to_svg(drawn, f"{group.title}: the samples with most extra weight"),
        f"The samples with most extra weight, {run.arm}, seed {run.seed}: label, how often a plain "
        "step would have harmed it of the times it was seen, and the sum of its extra weights.",
    )


def _ends(looked: Looked, count: int) -> dict[str, Sequence[dict[str, Any]]]:
    """The first, the last and some between."""
    labels = list(looked)
    places = {round(k * (len(labels) - 1) / max(1, count - 1)) for k in range(count)}
    return {labels[place]: looked[labels[place]] for place in sorted(places)}


def _with_column(arms: Arms, table: str, *names: str) -> dict[str, list[RunRecord]]:
    """The arms all of whose runs have these columns with something in them."""
    return {
        arm: list(runs)
        for arm, runs in arms.items()
        if all(
            any(v is not None for v in getattr(r, table).get(n, ())) for r in runs for n in names
        )
    }


def _tables(arms: Arms) -> dict[str, list[dict[str, list[Any]]]]:
    return {arm: [run.steps for run in runs] for arm, runs in arms.items()}


def _seeds(arms: Arms) -> int:
    return max(len(runs) for runs in arms.values())
