"""All names are there, and each has something to run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.cli import NAMES
from primum.experiments.sweeps.reproduce.experiments import EXPERIMENTS
from primum.experiments.sweeps.settings import SettingsError


def test_the_command_knows_every_experiment() -> None:
    assert tuple(EXPERIMENTS) == NAMES
    assert all(experiment.title and experiment.small for experiment in EXPERIMENTS.values())
    assert EXPERIMENTS["table1"].seeds == 5
    assert EXPERIMENTS["gram"].seeds is None


@pytest.mark.parametrize("name", ["figure2", "gram", "gram-adamw"])
def test_a_device_that_would_not_be_used_is_refused(name: str, place: Place) -> None:
    with pytest.raises(SettingsError, match="leave out --device cuda"):
        EXPERIMENTS[name].run("smoke", range(1), place, "cuda")


@pytest.mark.parametrize("name", ["figure1", "figure2", "multilayer", "gram", "gram-adamw"])
def test_data_workers_that_would_not_be_used_are_refused(name: str, place: Place) -> None:
    with pytest.raises(SettingsError, match="leave out --data-workers"):
        EXPERIMENTS[name].run("smoke", range(1), replace(place, data_workers=1), "cpu")
