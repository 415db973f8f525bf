"""Draw the README's plot from the results of `primum demo`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from primum.diagnostics.figures.style import NAMED

ARMS = ("base", "primum", "permuted", "lr-matched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/demo/results.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/demo.png"))
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    runs = [r for r in results["runs"] if r["settings"]["model"] == "digits-cnn"]
    figure = Figure(figsize=(9.5, 3.4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    _losses(left, runs)
    _batch(right, next(r for r in runs if r["arm"] == "primum"))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out)
    print(f"wrote {arguments.out}")


def _losses(axes: Any, runs: list[dict[str, Any]]) -> None:
    for arm in ARMS:
        curves = np.array([r["curves"]["test_loss"] for r in runs if r["arm"] == arm])
        epochs = np.arange(1, curves.shape[1] + 1)
        axes.plot(epochs, curves.mean(0), NAMED[arm].dashes, color=NAMED[arm].colour, label=arm)
    title = f"CNN, SGD: mean of {len(curves)} seeds"
    axes.set(xlabel="epoch", ylabel="test loss", title=title)


def _batch(axes: Any, run: dict[str, Any]) -> None:
    before, after = np.array(run["batch"]["before"]), np.array(run["batch"]["after"])
    order = np.argsort(before)
    samples = np.arange(1, len(order) + 1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.vlines(samples, before[order], after[order], color="black", linewidth=0.8, alpha=0.3)
    axes.plot(
        samples, before[order], "o", color=NAMED["base"].colour, markersize=4, label="plain step"
    )
    axes.plot(
        samples,
        after[order],
        "D",
        color=NAMED["primum"].colour,
        markersize=3,
        label="with extra weights",
    )
    axes.set(xlabel="samples of one batch, sorted", ylabel="first-order change of its loss")
    axes.set_title("above the line: harmed by the step")


if __name__ == "__main__":
    main()
