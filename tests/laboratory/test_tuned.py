"""Tuned settings: the rate that is used is one of those tried, and base alone was tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.arms import Arm
from lab.speedrun import MAIN, TUNING_SEED
from lab.store import Store
from lab.tuned import CONTROLS, SETTINGS, control_runs, rate_runs, tuned_runs


def test_every_arm_uses_a_rate_that_base_was_tuned_over() -> None:
    for setting in SETTINGS:
        assert setting.run.rate in setting.rates
        assert setting.run.epochs % 3 == 0
    runs = rate_runs()
    assert {run.arm.name for run in runs} == {"base"}
    assert {run.seed for run in runs} == {TUNING_SEED}
    lengths = [len(setting.rates) + len(setting.nearest) for setting in SETTINGS]
    assert len(runs) == len({run.key for run in runs}) == sum(lengths)
    assert all(setting.run.rate in setting.nearest for setting in SETTINGS)
    compared = tuned_runs()
    assert TUNING_SEED not in {run.seed for run in compared}
    assert {run.key for run in runs}.isdisjoint(run.key for run in compared)


def test_the_rate_that_is_used_is_the_best_of_the_committed_runs() -> None:
    found = Store(Path(__file__).parents[2] / "results")
    complete = 0
    for setting in SETTINGS:
        own = (setting.run.model, setting.run.norm, setting.run.data, setting.run.optimizer)
        runs = [r for r in rate_runs() if (r.model, r.norm, r.data, r.optimizer) == own]
        for length in sorted({run.epochs for run in runs}, reverse=True):
            tried = [run for run in runs if run.epochs == length]
            records = [found.find(run) for run in tried]
            accuracies = [each.final["test_accuracy"] or 0 for each in records if each is not None]
            if len(accuracies) == len(tried):
                complete += 1
                best = max(zip(accuracies, tried, strict=True), key=lambda pair: pair[0])[1]
                assert best.rate == setting.run.rate
                break  # the longest schedule that was tried decides
    assert complete >= 2


def test_five_seeds_of_base_and_the_default_three_of_smaller_radii_seed_by_seed() -> None:
    runs = tuned_runs()
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for setting in SETTINGS:
        seeds = {
            arm: sum(
                replace(run, arm=setting.run.arm, seed=0) == setting.run
                and run.arm == Arm.parse(arm)
                for run in runs
            )
            for arm in MAIN
        }
        few = 0 if setting.run.norm == "batch" else 3
        assert list(seeds.values()) == [5, few, few, 5]
    assert len({run.key for run in runs}) == len(runs)


def test_the_controls_share_base_and_the_default_with_the_comparison() -> None:
    runs = control_runs()
    assert {(run.model, run.norm, run.rate) for run in runs} == {("resnet20", "batch", 0.2)}
    shared = {run.key for run in runs} & {run.key for run in tuned_runs()}
    assert len(shared) == 5 * 2
    controls = [(run.arm, run.seed) for run in runs if run.key not in shared]
    assert sorted(seed for _, seed in controls) == sorted(3 * [0, 1, 2])
    assert {arm for arm, _ in controls} == {Arm.parse(arm) for arm in CONTROLS}
