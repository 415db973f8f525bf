"""All runs of a demo: the order, the factor and the number of processes."""

from __future__ import annotations

import pytest
import torch

from primum.experiments.arms import ARMS
from primum.experiments.demo import run_demo
from primum.experiments.recipes import Recipe
from primum.experiments.results import Results


def _demo(recipe: Recipe, threads: int) -> Results:
    return run_demo([recipe], list(ARMS), [0, 1], threads=threads, turns=1, command="primum demo")


def test_number_of_processes_changes_no_result(tiny: Recipe) -> None:
    alone, shared = _demo(tiny, threads=1), _demo(tiny, threads=2)
    assert alone.runs == shared.runs


def test_order_and_learning_rate_factor(tiny: Recipe) -> None:
    results = _demo(tiny, threads=1)
    assert list(results.arms(tiny.name)) == list(ARMS)
    arms = results.arms(tiny.name)
    for matched, reduced in zip(arms["lr-matched"], arms["primum"], strict=True):
        assert matched.settings.seed == reduced.settings.seed
        assert matched.settings.lr_factor == reduced.mean_weight > 1
    assert {run.settings.lr_factor for run in arms["base"] + arms["permuted"]} == {1.0}
    assert len(results.times) == 2 * len(ARMS)


def test_torchs_threads_are_given_back(tiny: Recipe) -> None:
    torch.set_num_threads(2)
    _demo(tiny, threads=1)
    assert torch.get_num_threads() == 2


def test_a_failing_run_is_not_hidden(tiny: Recipe) -> None:
    with pytest.raises(KeyError):
        run_demo([tiny], ["base", "unknown"], [0], threads=2, turns=1, command="")
