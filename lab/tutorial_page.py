"""Tables and plots of docs/tutorial.md, from the runs of the study `tutorial`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lab.defaults import OPTIMIZERS
from lab.formatting import show
from lab.plots import curves, protected_samples
from lab.runs import RunRecord
from lab.statistics import interval
from lab.study_results import Results
from lab.tables import of_weighting
from lab.text_tables import markdown_table
from primum.diagnostics import figures

WEIGHTINGS = ("head", "paper", "network", "permuted", "uniform")
ARMS = {"base": "base", "primum": "head", "network": "network"}
PAIRS = (("primum", "base"), ("network", "base"), ("primum", "network"))
BATCHES = (32, 128, 512)
Runs = Sequence[RunRecord]


def select(
    runs: Runs, arm: str, optimizer: str, batch: int = 128, model: str = "cnn-small"
) -> list[RunRecord]:
    """The runs of an arm with these settings, sorted by seed."""
    wanted = {"optimizer": optimizer, "batch_size": batch, "model": model}.items()
    return [run for run in runs if run.arm == arm and wanted <= run.settings.items()]


def moments(
    runs: Runs, optimizer: str, batch: int = 128, model: str = "cnn-small", *,
    first: float, last: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Measurements of all seeds of base, from one epoch to another."""
    return [
        moment
        for run in select(runs, "base", optimizer, batch, model)
        for moment in run.moments
        if first <= moment["step"] / run.settings["look"]["every"] <= last
    ]


def stretch(runs: Runs, column: str, first: float, last: float) -> list[float]:
    """Mean of a metric for each seed, over the steps between two fractions of the run."""
    means = []
    for run in runs:
        end = run.settings["steps"]
        rows = zip(run.steps["step"], run.steps[column], strict=True)
        kept = [value for step, value in rows if first * end <= step < last * end]
        means.append(float(np.mean(kept)))
    return means


def _percent(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.0f}"


def _batch_sizes(runs: Runs) -> Iterator[tuple[str, int]]:
    for optimizer in OPTIMIZERS:
        for batch in BATCHES:
            if select(runs, "base", optimizer, batch):
                yield optimizer, batch


def _models(runs: Runs) -> Iterator[tuple[str, str]]:
    for model in ("cnn-small", "resnet20", "vit-micro"):
        for optimizer in OPTIMIZERS:
            if select(runs, "base", optimizer, model=model):
                yield model, optimizer


def harmed(runs: Runs) -> str:
    """Share of samples that a step harms, by optimizer and batch size."""
    head = ["optimizer", "batch", "seeds", "head, first fifth", "head, last fifth",
            "network, epochs 1-2", "network, epochs 4-5", "really, epochs 1-2",
            "really, epochs 4-5"]  # fmt: skip
    rows = []
    for optimizer, batch in _batch_sizes(runs):
        own = select(runs, "base", optimizer, batch)
        row = [OPTIMIZERS[optimizer], str(batch), str(len(own))]
        row += [_percent(stretch(own, "harmed_before", *ends)) for ends in ((0, 0.2), (0.8, 1))]
        for column in ("harmed", "harmed_real"):
            for first, last in ((1, 2), (4, 5)):
                found = moments(runs, optimizer, batch, first=first, last=last)
                row.append(_percent(of_weighting(found, column, "plain")))
        rows.append(row)
    return markdown_table(head, rows)


def proxy(runs: Runs) -> str:
    """Error and scale of the Gram matrix of the head, and of the last three layers."""
    head = ["model", "optimizer", "error, head, at first", "error, head, last epoch",
            "error, last 3 layers, last epoch", "scale, head, at first",
            "scale, head, last epoch"]  # fmt: skip
    rows = []
    for model, optimizer in _models(runs):
        settings = select(runs, "base", optimizer, model=model)[0].settings
        end = settings["steps"] // settings["look"]["every"]
        row = [model, OPTIMIZERS[optimizer]]
        for column, layer, when in (("error", -1, 0), ("error", -1, end), ("error", -3, end),
                                    ("scale", -1, 0), ("scale", -1, end)):  # fmt: skip
            found = moments(runs, optimizer, model=model, first=when, last=when)
            digits = 2 if column == "error" else 1
            row.append(f"{np.mean([m[column][layer] for m in found]):.{digits}f}")
        rows.append(row)
    return markdown_table(head, rows)


def _reors(found: Sequence[dict[str, Any]]) -> list[str]:
    """Number of batches, and the mean REOR of each weighting."""
    means = (_percent(of_weighting(found, "reor", name)) for name in WEIGHTINGS)
    return [str(len(found)), *means]


def removed(runs: Runs) -> str:
    """REOR by model and weighting, over all batches from the first epoch on."""
    rows = []
    for model, optimizer in _models(runs):
        found = moments(runs, optimizer, model=model, first=1, last=9)
        rows.append([model, OPTIMIZERS[optimizer], *_reors(found)])
    return markdown_table(["model", "optimizer", "batches", *WEIGHTINGS], rows)


def removed_by_batch(runs: Runs) -> str:
    """REOR of the small CNN by batch size."""
    rows = []
    for optimizer, batch in _batch_sizes(runs):
        found = moments(runs, optimizer, batch, first=1, last=9)
        rows.append([OPTIMIZERS[optimizer], str(batch), *_reors(found)])
    return markdown_table(["optimizer", "batch", "batches", *WEIGHTINGS], rows)


def truth(runs: Runs) -> str:
    """How often first order predicts the sign, by learning rate."""
    rows = []
    for optimizer, batch in _batch_sizes(runs):
        for when, (first, last) in {"before training": (0, 0), "epochs 4-5": (4, 5)}.items():
            found = moments(runs, optimizer, batch, first=first, last=last)
            right = np.array([moment["by_lr"]["sign_right"] for moment in found])
            row = [OPTIMIZERS[optimizer], str(batch), when]
            rows.append(row + [_percent(column) for column in right.T])
    return markdown_table(["optimizer", "batch", "when", "lr/16", "lr/4", "lr", "4 lr"], rows)


def trained(runs: Runs) -> str:
    """Test accuracy after training with each kind of weights, and paired differences."""
    head = ["optimizer", "base", "head's weights", "network's weights", "head - base",
            "network - base", "head - network"]  # fmt: skip
    rows = []
    for optimizer in OPTIMIZERS:
        ends = {arm: _last_accuracies(select(runs, arm, optimizer)) for arm in ARMS}
        row = [OPTIMIZERS[optimizer], *(show(interval(each.tolist()), 1) for each in ends.values())]
        for mine, other in PAIRS:
            row.append(show(interval((ends[mine] - ends[other]).tolist()), 1, sign="+"))
        rows.append(row)
    return markdown_table(head, rows)


def _last_accuracies(runs: Runs) -> Any:
    """Final test accuracies in percent, as an array."""
    return np.array([100 * run.curves["test_accuracy"][-1] for run in runs])


def ahead(runs: Runs) -> str:
    """For how many seeds and epochs one arm's test accuracy is above another's."""
    rows = []
    for optimizer in OPTIMIZERS:
        row = [OPTIMIZERS[optimizer]]
        for pair in PAIRS:
            mine, other = ([_after_epochs(run) for run in select(runs, arm, optimizer)]
                           for arm in pair)  # fmt: skip
            higher = np.array(mine) > np.array(other)
            row.append(f"{higher.sum()} of {higher.size}")
        rows.append(row)
    names = [f"{ARMS[mine]} above {ARMS[other]}" for mine, other in PAIRS]
    return markdown_table(["optimizer", *names], rows)


def _after_epochs(run: RunRecord) -> list[float]:
    """Test accuracy after each epoch; base also has one from before training."""
    kept = zip(run.curves["epoch"], run.curves["test_accuracy"], strict=True)
    return [accuracy for epoch, accuracy in kept if epoch >= 1]


def one_step(runs: Runs) -> str:
    """Loss change of one step with weights minus that of the plain step, in thousandths."""
    rows = []
    for optimizer in OPTIMIZERS:
        found = moments(runs, optimizer, first=1, last=9)
        for column, name in (("mean_change", "its batch"), ("test_change", "test images")):
            plain = np.array(of_weighting(found, column, "plain"))
            row = [OPTIMIZERS[optimizer], name, f"{1000 * plain.mean():+.1f}"]
            for weighting in WEIGHTINGS:
                changes = 1000 * (np.array(of_weighting(found, column, weighting)) - plain)
                row.append(show(interval(changes.tolist()), 1, sign="+"))
            rows.append(row)
    head = ["optimizer", "loss of", "plain", *(f"{name} - plain" for name in WEIGHTINGS)]
    return markdown_table(head, rows)


def _maker(make: Callable[[Runs], str]) -> Callable[[Results], str]:
    return lambda results: make(results.runs["tutorial"])


_TABLES = (harmed, proxy, removed, removed_by_batch, truth, trained, ahead, one_step)
MAKERS = {f"tutorial-{make.__name__.replace('_', '-')}": _maker(make) for make in _TABLES}


def tutorial_plots(runs: Runs) -> dict[str, Figure]:
    """Plots by file name."""
    drawn: dict[str, Figure] = {}
    ends = {"at first": (0, 0), "epochs 4-5": (4, 5)}
    late = {name: moments(runs, o, first=1, last=9) for o, name in OPTIMIZERS.items()}
    by_time = {
        f"{name}, {when}": moments(runs, o, first=first, last=last)
        for o, name in OPTIMIZERS.items()
        for when, (first, last) in ends.items()
    }
    for optimizer, name in OPTIMIZERS.items():
        lines = {
            f"batches of {batch}": [_by_epoch(run) for run in own]
            for batch in BATCHES
            if (own := select(runs, "base", optimizer, batch))
        }
        drawn[f"harmed-{optimizer}"] = figures.harmed_share(lines, by="epoch", title=name)
        records = {ARMS[arm]: [_from_first_epoch(run) for run in select(runs, arm, optimizer)]
                   for arm in ARMS}  # fmt: skip
        drawn[f"trained-{optimizer}"] = curves(records, "test_accuracy", title=name)
    drawn["depth"] = figures.error_by_depth(by_time)
    deep = moments(runs, "sgd", model="resnet20", first=0, last=9)
    steps = sorted({moment["step"] for moment in deep})
    drawn["depth-resnet20"] = figures.error_by_depth(
        {f"step {step}": [m for m in deep if m["step"] == step] for step in steps}
    )
    drawn["reor"] = figures.reor_by_weighting(
        {name: {w: of_weighting(found, "reor", w) for w in WEIGHTINGS}
         for name, found in late.items()}
    )  # fmt: skip
    drawn["truth"] = figures.first_order_truth(
        {label: [moment["by_lr"] for moment in found] for label, found in by_time.items()}
    )
    first = select(runs, "base", "sgd")[0]
    last = [moment for moment in first.moments if "changes" in moment][-1]
    drawn["batch"] = figures.one_batch(last["changes"]["plain"], last["changes"]["head"])
    drawn["weights"] = figures.weight_bands([first.steps], "head")
    drawn["gap"] = figures.solver_gap(
        {name: [run.steps for run in select(runs, "base", o)] for o, name in OPTIMIZERS.items()}
    )
    drawn["protected"] = protected_samples(first.protected[:18])
    return {f"tutorial-{name}": figure for name, figure in drawn.items()}


def _by_epoch(run: RunRecord) -> dict[str, list[Any]]:
    every = run.settings["look"]["every"]
    return run.steps | {"epoch": [step / every for step in run.steps["step"]], "applied": [False]}


def _from_first_epoch(run: RunRecord) -> RunRecord:
    """The run without the evaluation before training, in which all arms are equal."""
    kept = [place for place, epoch in enumerate(run.curves["epoch"]) if epoch >= 1]
    names = ("epoch", "test_accuracy")
    return replace(run, curves={name: [run.curves[name][k] for k in kept] for name in names})
