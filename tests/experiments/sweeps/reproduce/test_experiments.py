"""All names are there, and each has something to run."""

from __future__ import annotations

from primum.experiments.sweeps.reproduce.cli import NAMES
from primum.experiments.sweeps.reproduce.experiments import EXPERIMENTS


def test_the_command_knows_every_experiment() -> None:
    assert tuple(EXPERIMENTS) == NAMES
    assert all(experiment.title for experiment in EXPERIMENTS.values())
    assert EXPERIMENTS["table1"].seeds == 5
    assert EXPERIMENTS["gram"].seeds is None
