"""Tuned settings: the rate that is used is one of those tried, and base alone was tuned."""

from __future__ import annotations

from pathlib import Path

from primum.experiments.arms import Arm
from primum.experiments.speedrun import MAIN, TUNING_SEED
from primum.experiments.store import Store
from primum.experiments.tuned import SETTINGS, rate_runs, tuned_runs


def test_every_arm_uses_a_rate_that_base_was_tuned_over() -> None:
    for setting in SETTINGS:
        assert setting.run.rate in setting.rates
        assert setting.run.epochs % 3 == 0
    runs = rate_runs()
    assert {run.arm.name for run in runs} == {"base"}
    assert {run.seed for run in runs} == {TUNING_SEED}
    assert len(runs) == sum(len(setting.rates) for setting in SETTINGS)
    compared = tuned_runs()
    assert TUNING_SEED not in {run.seed for run in compared}
    assert {run.key for run in runs}.isdisjoint(run.key for run in compared)


def test_the_rate_that_is_used_is_the_best_of_the_committed_runs() -> None:
    found = Store(Path(__file__).parents[2] / "results")
    complete = 0
    for setting in SETTINGS:
        by_rate = {}
        for run in rate_runs():
            same = (run.model, run.data, run.optimizer)
            if same == (setting.run.model, setting.run.data, setting.run.optimizer):
                record = found.find(run)
                if record is not None:
                    by_rate[run.rate] = record.final["test_accuracy"] or 0.0
        if len(by_rate) == len(setting.rates):
            complete += 1
            assert max(by_rate, key=by_rate.__getitem__) == setting.run.rate
    assert complete >= 2


def test_stopped_anywhere_arms_have_about_as_many_seeds() -> None:
    runs = tuned_runs(range(2))
    assert len(runs) == 2 * len(MAIN) * len(SETTINGS)
    assert [run.arm for run in runs[: len(MAIN)]] == [Arm.parse(arm) for arm in MAIN]
    assert {run.seed for run in runs[: len(runs) // 2]} == {0}
