"""Learning curves: every arm is drawn, and nothing but the shape depends on the data."""

from __future__ import annotations

import pytest

from primum.experiments import figures
from primum.experiments.arms import ARMS
from primum.experiments.runs import RunRecord


def run(arm: str, seed: int, losses: list[float | None]) -> RunRecord:
    epochs = list(range(1, len(losses) + 1))
    accuracy = [None if loss is None else 1 - loss / 4 for loss in losses]
    curves = {"epoch": epochs, "test_loss": losses, "test_accuracy": accuracy}
    return RunRecord("n", arm, seed, curves=curves)


def test_every_arm_has_a_colour_and_dashes() -> None:
    assert set(figures.COLOURS) == set(figures.DASHES) == set(ARMS)
    assert len(set(figures.COLOURS.values())) == len(set(figures.DASHES.values())) == len(ARMS)


def test_mean_over_seeds_and_a_band() -> None:
    arms = {"base": [run("base", 0, [2.0, 1.0]), run("base", 1, [2.0, 2.0])]}
    axes = figures.curves(arms, "test_loss").axes[0]
    (line,) = axes.get_lines()
    assert line.get_label() == "base"
    assert line.get_ydata() == pytest.approx([2.0, 1.5])
    assert len(axes.collections) == 1


def test_one_seed_has_no_band_and_accuracy_is_in_percent() -> None:
    axes = figures.curves({arm: [run(arm, 0, [2.0, 1.0])] for arm in ARMS}, "test_accuracy").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == list(ARMS)
    assert axes.get_lines()[0].get_ydata() == pytest.approx([50, 75])
    assert not axes.collections


def test_missing_figures_and_shorter_runs() -> None:
    arms = {"base": [run("base", 0, [None, 2.0, 1.0]), run("base", 1, [3.0, 2.0])]}
    (line,) = figures.curves(arms, "test_loss").axes[0].get_lines()
    assert line.get_xdata().tolist() == [2]


def test_over_steps_and_over_time() -> None:
    runs = [run("base", seed, [3.0, 2.0]) for seed in (0, 1)]
    for seed, each in enumerate(runs):
        each.curves.update(step=[39, 78], seconds=[1.0 + seed, 3.0 + seed])
    for by, label, places in (
        ("step", "step", [39, 78]),
        ("seconds", "seconds of training", [1.5, 3.5]),
    ):
        axes = figures.curves({"base": runs}, "test_loss", by=by).axes[0]
        assert axes.get_xlabel() == label
        assert axes.get_lines()[0].get_xdata().tolist() == places
