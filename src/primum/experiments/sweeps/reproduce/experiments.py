"""All experiments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.accuracy import TABLES
from primum.experiments.sweeps.reproduce.blocks import run_blocks
from primum.experiments.sweeps.reproduce.findings import Finding, Scale
from primum.experiments.sweeps.reproduce.layers import run_layers
from primum.experiments.sweeps.reproduce.scripts import run_gram, run_solver
from primum.experiments.sweeps.reproduce.training import run_table
from primum.experiments.sweeps.settings import SettingsError


@dataclass(frozen=True)
class Experiment:
    """A part of the paper and what makes it again.

    Attributes:
        title: What it is, for a list.
        seeds: Over how many the paper averages; None where there are none.
        run: From scale, seeds, place and device to findings.
    """

    title: str
    seeds: int | None
    run: Callable[[Scale, Sequence[int], Place, str], list[Finding]]


def _table(name: str) -> Experiment:
    table = TABLES[name]

    def run(scale: Scale, seeds: Sequence[int], place: Place, device: str) -> list[Finding]:
        return run_table(table, scale, seeds, place, device)

    return Experiment(table.title, table.seeds, run)


def _without_seeds(title: str, make: Callable[[Scale, Place], list[Finding]]) -> Experiment:
    def run(scale: Scale, seeds: Sequence[int], place: Place, device: str) -> list[Finding]:
        if device != "cpu":
            raise SettingsError(f"this one is made on the CPU; leave out --device {device}")
        return make(scale, place)

    return Experiment(title, None, run)


EXPERIMENTS: dict[str, Experiment] = {
    "table1": _table("table1"),
    "table2a": _table("table2a"),
    "table2b": _table("table2b"),
    "ablation-radius": _table("ablation-radius"),
    "figure1": _without_seeds("Figure 1: how well the last layer stands for all", run_layers),
    "figure2": _without_seeds("Figure 2: convergence of the solver", run_solver),
    "multilayer": Experiment(
        "Figure 11: explicit gradients of several last blocks",
        None,
        lambda scale, seeds, place, device: run_blocks(scale, place, device),
    ),
    "gram": _without_seeds(
        "Table 3: cost of the Gram matrix, SGD", partial(run_gram, optimizer="sgd")
    ),
    "gram-adamw": _without_seeds(
        "Table 4: cost of the Gram matrix, AdamW", partial(run_gram, optimizer="adamw")
    ),
}
