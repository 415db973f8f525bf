"""Tables and pictures of docs/tutorial.md, from benchmarks/results/tutorial.json.

python benchmarks/tutorial_page.py       # prints the tables, writes docs/images/tutorial-*.png
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import RESULTS, describe, markdown_table
from matplotlib.figure import Figure
from matplotlib.image import imread

from primum.diagnostics import figures
from primum.experiments.figures import curves
from primum.experiments.runs import RunRecord
from primum.experiments.statistics import difference, interval

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
WEIGHTINGS = ("head", "paper", "network", "permuted", "uniform")
ARMS = {"watched": "base", "head": "head", "network": "network"}
Run = dict[str, Any]


class Results:
    """The runs, by what is asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.runs: list[Run] = list(content["runs"].values())
        self.environment = content["environment"]

    def of(self, arm: str, optimizer: str, batch: int = 128, model: str = "cnn-small") -> list[Run]:
        """By seed."""
        wanted = {"arm": arm, "optimizer": optimizer, "batch_size": batch, "model": model}
        return [run for run in self.runs if wanted.items() <= run.items()]

    def batches(self, *args: Any, first: float, last: float, **kwargs: Any) -> list[dict[str, Any]]:
        """Measured batches of all seeds, from one epoch to another."""
        return [
            moment
            for run in self.of(*args, **kwargs)
            for moment in run["moments"]
            if first <= moment["step"] / run["settings"]["every"] <= last
        ]


def of_weighting(moments: Sequence[dict[str, Any]], column: str, name: str) -> list[float]:
    """A column of the tables for one weighting; what is unknown is left out."""
    found = [m["table"][column][m["table"]["weights"].index(name)] for m in moments]
    return [value for value in found if value is not None]


def stretch(runs: Sequence[Run], column: str, first: float, last: float) -> list[float]:
    """Each seed's mean of a per-step figure between two shares of its run."""
    means = []
    for run in runs:
        steps, end = run["steps"], run["settings"]["train_steps"]
        kept = [
            value
            for step, value in zip(steps["step"], steps[column], strict=True)
            if first * end <= step < last * end
        ]
        means.append(float(np.mean(kept)))
    return means


def tables(results: Results) -> dict[str, str]:
    """Markdown, by name; docs/tutorial.md has each of them word for word."""
    return {name: make(results) for name, make in MAKERS.items()}


def _percent(values: Sequence[float], digits: int = 0) -> str:
    return f"{100 * np.mean(values):.{digits}f}"


def _each(results: Results) -> Iterator[tuple[str, int]]:
    for optimizer in OPTIMIZERS:
        for batch in (32, 128, 512):
            if results.of("watched", optimizer, batch):
                yield optimizer, batch


def harmed(results: Results) -> str:
    """How many samples a step harms, by optimizer and batch size."""
    head = ["optimizer", "batch", "seeds", "head, first fifth", "head, last fifth",
            "network, epochs 1-2", "network, epochs 4-5", "really, epochs 1-2",
            "really, epochs 4-5"]  # fmt: skip
    rows = []
    for optimizer, batch in _each(results):
        runs = results.of("watched", optimizer, batch)
        row = [OPTIMIZERS[optimizer], str(batch), str(len(runs))]
        row += [_percent(stretch(runs, "harmed_before", *ends)) for ends in ((0, 0.2), (0.8, 1))]
        for column in ("harmed", "harmed_real"):
            for first, last in ((1, 2), (4, 5)):
                moments = results.batches("watched", optimizer, batch, first=first, last=last)
                row.append(_percent(of_weighting(moments, column, "plain")))
        rows.append(row)
    return markdown_table(head, rows)


def proxy(results: Results) -> str:
    """Error and scale of the Gram matrix of the head, and of the last three layers."""
    head = ["model", "optimizer", "error, head, at first", "error, head, last epoch",
            "error, last 3 layers, last epoch", "scale, head, at first",
            "scale, head, last epoch"]  # fmt: skip
    rows = []
    for model, optimizer in _nets(results):
        end = results.of("watched", optimizer, model=model)[0]["epochs"]
        row = [model, OPTIMIZERS[optimizer]]
        for column, layer, when in (
            ("error", -1, 0),
            ("error", -1, end),
            ("error", -3, end),
            ("scale", -1, 0),
            ("scale", -1, end),
        ):
            moments = results.batches("watched", optimizer, model=model, first=when, last=when)
            digits = 2 if column == "error" else 1
            row.append(f"{np.mean([m[column][layer] for m in moments]):.{digits}f}")
        rows.append(row)
    return markdown_table(head, rows)


def removed(results: Results) -> str:
    """REOR by weighting, over all batches from the first epoch on."""
    rows = []
    for model, optimizer in _nets(results):
        moments = results.batches("watched", optimizer, model=model, first=1, last=9)
        row = [model, OPTIMIZERS[optimizer], str(len(moments))]
        rows.append(row + [_percent(of_weighting(moments, "reor", n)) for n in WEIGHTINGS])
    return markdown_table(["model", "optimizer", "batches", *WEIGHTINGS], rows)


def removed_by_batch(results: Results) -> str:
    """REOR of the small CNN by batch size."""
    rows = []
    for optimizer, batch in _each(results):
        moments = results.batches("watched", optimizer, batch, first=1, last=9)
        row = [OPTIMIZERS[optimizer], str(batch), str(len(moments))]
        rows.append(row + [_percent(of_weighting(moments, "reor", n)) for n in WEIGHTINGS])
    return markdown_table(["optimizer", "batch", "batches", *WEIGHTINGS], rows)


def truth(results: Results) -> str:
    """How often first order has the sign right, by learning rate."""
    rows = []
    for optimizer, batch in _each(results):
        for when, (first, last) in {"before training": (0, 0), "epochs 4-5": (4, 5)}.items():
            moments = results.batches("watched", optimizer, batch, first=first, last=last)
            right = np.array([moment["by_lr"]["sign_right"] for moment in moments])
            row = [OPTIMIZERS[optimizer], str(batch), when]
            rows.append(row + [_percent(column) for column in right.T])
    return markdown_table(["optimizer", "batch", "when", "lr/16", "lr/4", "lr", "4 lr"], rows)


def trained(results: Results) -> str:
    """Test accuracy after training with each kind of weights, and the differences."""
    head = ["optimizer", "base", "head's weights", "network's weights", "head - base",
            "network - base", "head - network"]  # fmt: skip
    rows = []
    for optimizer in OPTIMIZERS:
        ends = {arm: _accuracies(results.of(arm, optimizer)) for arm in ARMS}
        row = [OPTIMIZERS[optimizer]]
        row += [_interval(interval(values)) for values in ends.values()]
        for mine, other in (("head", "watched"), ("network", "watched"), ("head", "network")):
            row.append(_interval(difference(ends[mine], ends[other]).paired, sign="+"))
        rows.append(row)
    return markdown_table(head, rows)


def ahead(results: Results) -> str:
    """In how many pairs of seed and epoch one arm's test accuracy is higher than another's."""
    pairs = (("head", "watched"), ("network", "watched"), ("head", "network"))
    rows = []
    for optimizer in OPTIMIZERS:
        row = [OPTIMIZERS[optimizer]]
        for mine, other in pairs:
            both = zip(results.of(mine, optimizer), results.of(other, optimizer), strict=True)
            higher = [
                a > b
                for first, second in both
                for a, b in zip(_by_epochs(first), _by_epochs(second), strict=True)
            ]
            row.append(f"{sum(higher)} of {len(higher)}")
        rows.append(row)
    names = [f"{ARMS[mine]} above {ARMS[other]}" for mine, other in pairs]
    return markdown_table(["optimizer", *names], rows)


def one_step(results: Results) -> str:
    """What weights change in the loss after one step, against the plain step, in thousandths."""
    rows = []
    for optimizer in OPTIMIZERS:
        moments = results.batches("watched", optimizer, first=1, last=9)
        for column, name in (("mean_change", "its batch"), ("test_change", "test images")):
            plain = of_weighting(moments, column, "plain")
            row = [OPTIMIZERS[optimizer], name, f"{1000 * np.mean(plain):+.1f}"]
            for weighting in WEIGHTINGS:
                changes = zip(of_weighting(moments, column, weighting), plain, strict=True)
                found = interval([1000 * (mine - theirs) for mine, theirs in changes])
                row.append(_interval(found, sign="+"))
            rows.append(row)
    head = ["optimizer", "loss of", "plain", *(f"{name} - plain" for name in WEIGHTINGS)]
    return markdown_table(head, rows)


MAKERS: dict[str, Callable[[Results], str]] = {
    "harmed": harmed,
    "proxy": proxy,
    "removed": removed,
    "removed by batch": removed_by_batch,
    "truth": truth,
    "trained": trained,
    "ahead": ahead,
    "one step": one_step,
}


def pictures(results: Results) -> dict[str, Figure]:
    """By the end of their file names."""
    drawn = {}
    for optimizer, name in OPTIMIZERS.items():
        lines = {
            f"batches of {batch}": [_by_epoch(run) for run in runs]
            for batch in (32, 128, 512)
            if (runs := results.of("watched", optimizer, batch))
        }
        drawn[f"harmed-{optimizer}"] = figures.harmed_share(lines, by="epoch", title=name)
        records = {
            ARMS[arm]: [_record(run) for run in runs]
            for arm in ARMS
            if (runs := results.of(arm, optimizer))
        }
        drawn[f"trained-{optimizer}"] = curves(records, "test_accuracy", title=name)
    ends = {"at first": (0, 0), "epochs 4-5": (4, 5)}
    drawn["depth"] = figures.error_by_depth(
        {
            f"{name}, {when}": results.batches("watched", optimizer, first=first, last=last)
            for optimizer, name in OPTIMIZERS.items()
            for when, (first, last) in ends.items()
        }
    )
    deep = results.batches("watched", "sgd", model="resnet20", first=0, last=9)
    if deep:
        by_step = {
            step: [m for m in deep if m["step"] == step] for step in {m["step"] for m in deep}
        }
        drawn["depth-resnet20"] = figures.error_by_depth(
            {f"step {step}": by_step[step] for step in sorted(by_step)}
        )
    drawn["reor"] = figures.reor_by_weighting(
        {
            name: {
                w: of_weighting(results.batches("watched", o, first=1, last=9), "reor", w)
                for w in WEIGHTINGS
            }
            for o, name in OPTIMIZERS.items()
        }
    )
    drawn["truth"] = figures.first_order_truth(
        {
            f"{name}, {when}": [
                m["by_lr"] for m in results.batches("watched", o, first=first, last=last)
            ]
            for o, name in OPTIMIZERS.items()
            for when, (first, last) in ends.items()
        }
    )
    first_seed = results.of("watched", "sgd")[0]
    last = [moment for moment in first_seed["moments"] if "changes" in moment][-1]
    drawn["batch"] = figures.one_batch(last["changes"]["plain"], last["changes"]["head"])
    drawn["weights"] = figures.weight_bands([first_seed["steps"]], "head")
    drawn["gap"] = figures.solver_gap(
        {name: [r["steps"] for r in results.of("watched", o)] for o, name in OPTIMIZERS.items()}
    )
    protected = first_seed["protected"][:18]
    drawn["protected"] = figures.sample_grid(
        [imread(io.BytesIO(base64.b64decode(each["png"]))) for each in protected],
        [
            f"{e['label']}\n{e['harmed']} of {e['seen']}, +{e['extra_weight']:.1f}"
            for e in protected
        ],
    )
    return drawn


def _nets(results: Results) -> Iterator[tuple[str, str]]:
    """Models and optimizers that were watched at batches of 128."""
    for model in ("cnn-small", "resnet20", "vit-micro"):
        for optimizer in OPTIMIZERS:
            if results.of("watched", optimizer, model=model):
                yield model, optimizer


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [100 * run["curves"]["test_accuracy"][-1] for run in runs]


def _by_epochs(run: Run) -> list[float]:
    """Test accuracy after each epoch; watched runs also have one before the first."""
    found: list[float] = run["curves"]["test_accuracy"]
    return found[-run["epochs"] :]


def _interval(found: Any, sign: str = "") -> str:
    return f"{found.mean:{sign}.1f} ± {found.half_width:.1f}"


def _by_epoch(run: Run) -> dict[str, list[Any]]:
    epochs = [step / run["settings"]["every"] for step in run["steps"]["step"]]
    return run["steps"] | {"epoch": epochs, "applied": [False]}


def _record(run: Run) -> RunRecord:
    """From the first epoch on; before it all are the same."""
    table = run["curves"]
    kept = [place for place, epoch in enumerate(table["epoch"]) if epoch >= 1]
    chosen = {name: [table[name][k] for k in kept] for name in ("epoch", "test_accuracy")}
    return RunRecord("", run["arm"], run["seed"], curves=chosen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "tutorial.json")
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args(argv)
    results = Results(json.loads(args.results.read_text()))
    for name, text in tables(results).items():
        print(f"\n{name}\n\n{text}")
    print("\n" + describe(results.environment))
    args.images.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures(results).items():
        path = args.images / f"tutorial-{name}.png"
        figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
