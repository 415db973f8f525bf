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
from primum.experiments.sweeps.reproduce.scales import SMALL_TABLES
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
        small: What is smaller at that scale.
    """

    title: str
    seeds: int | None
    run: Callable[[Scale, Sequence[int], Place, str], list[Finding]]
    small: str


def _table(name: str) -> Experiment:
    table = TABLES[name]

    def run(scale: Scale, seeds: Sequence[int], place: Place, device: str) -> list[Finding]:
        return run_table(table, scale, seeds, place, device)

    return Experiment(table.title, table.seeds, run, SMALL_TABLES)


Measure = Callable[[Scale, Place, str], list[Finding]]


def _measured(title: str, make: Measure, small: str) -> Experiment:
    def run(scale: Scale, seeds: Sequence[int], place: Place, device: str) -> list[Finding]:
        if place.data_workers:
            raise SettingsError("this one has its images in memory; leave out --data-workers")
        return make(scale, place, device)

    return Experiment(title, None, run, small)


def _on_the_cpu(make: Callable[[Scale, Place], list[Finding]]) -> Measure:
    def checked(scale: Scale, place: Place, device: str) -> list[Finding]:
        if device != "cpu":
            raise SettingsError(f"this one is made on the CPU; leave out --device {device}")
        return make(scale, place)

    return checked


GRAM = "All of the paper's sizes, on one thread of a CPU instead of a Tesla T4, two seconds each."
EXPERIMENTS: dict[str, Experiment] = {
    "table1": _table("table1"),
    "table2a": _table("table2a"),
    "table2b": _table("table2b"),
    "ablation-radius": _table("ablation-radius"),
    "figure1": _measured(
        "Figure 1: how well the last layer stands for all",
        run_layers,
        "The small CNN for ResNet-20 and the small transformer for ViT-small, 10,000 images, 10 "
        "epochs instead of 100.",
    ),
    "figure2": _measured(
        "Figure 2: convergence of the solver",
        _on_the_cpu(run_solver),
        "Networks of benchmarks/solvers.py, 150 steps, five problems of each.",
    ),
    "multilayer": _measured(
        "Figure 11: explicit gradients of several last blocks",
        run_blocks,
        "The paper's ResNet-20, 1,280 images in batches of 64, 3 epochs.",
    ),
    "gram": _measured(
        "Table 3: cost of the Gram matrix, SGD",
        _on_the_cpu(partial(run_gram, optimizer="sgd")),
        GRAM,
    ),
    "gram-adamw": _measured(
        "Table 4: cost of the Gram matrix, AdamW",
        _on_the_cpu(partial(run_gram, optimizer="adamw")),
        GRAM,
    ),
}
