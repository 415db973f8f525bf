"""Groups of runs, their metrics, and comparisons by the rule."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lab.runs import RunRecord
from lab.statistics import family
from lab.tables import Group, group_runs, metrics_of, until_base
from laboratory.conftest import MakeRuns, record


def only(runs: list[RunRecord]) -> Group:
    (group,) = group_runs(runs)
    return group


def test_base_and_primum_come_first_and_seeds_in_order(make_runs: MakeRuns) -> None:
    runs = make_runs({"permuted": 0.0, "primum": 1.0, "base": 0.0})
    group = only(runs[::-1])
    assert list(group.arms) == ["base", "primum", "permuted"]
    assert [run.seed for run in group.arms["base"]] == [0, 1, 2]
    assert group.focus == "primum"


def test_other_settings_are_another_group_with_another_title(make_runs: MakeRuns) -> None:
    first = make_runs({"base": 0.0}, settings={"lr": 0.1, "same": 1})
    second = make_runs({"base": 0.0}, settings={"lr": 0.2, "same": 1})
    assert [g.title for g in group_runs(first + second)] == ["a net (lr 0.1)", "a net (lr 0.2)"]


def test_metrics_over_seeds_and_only_of_finished_runs(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0})
    found = only(runs).interval("base", "accuracy")
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(80.1), 3)
    cut = only([*runs[:2], replace(runs[2], complete=False)]).interval("base", "accuracy")
    assert cut is not None
    assert (cut.mean, cut.count) == (pytest.approx(80.05), 2)
    assert only([replace(runs[0], final={})]).interval("base", "accuracy") is None
    assert only(runs).interval("primum", "accuracy") is None


def test_harm_of_the_step_taken(make_runs: MakeRuns) -> None:
    base, primum = make_runs({"base": 0.0, "primum": 0.0}, seeds=1)
    plain, weighted = metrics_of(base), metrics_of(primum)
    assert plain["harmed_taken"] == pytest.approx(40)
    assert weighted["harmed_taken"] == pytest.approx(25)
    assert plain["extra_weight"] is None
    assert weighted["extra_weight"] == pytest.approx(0.1)
    assert metrics_of(replace(base, steps={}))["harmed_taken"] is None


def test_how_soon_base_is_reached(make_runs: MakeRuns) -> None:
    def with_curves(run: RunRecord, losses: list[float | None], *steps: int) -> RunRecord:
        seconds = [step / 10 for step in steps]
        table = {"epoch": list(steps), "step": list(steps), "seconds": seconds}
        return replace(run, curves={**table, "test_loss": losses})

    base, primum = make_runs({"base": 0.0, "primum": 0.0}, seeds=1)
    plain = with_curves(base, [3.0, 2.0, 1.0, 1.5], 10, 20, 30, 40)  # the last, not the best
    for losses, steps, share in (
        ([2.0, 1.9, 1.8, 1.7], (10, 20, 30, 40), None),  # never
        ([2.0, 1.4, 1.0, None], (10, 20, 30, 40), None),  # diverged
        ([2.0, 1.4, 1.6, 1.5], (10, 20, 30, 40), 1.0),  # not where it was below for a moment
        ([2.0, 1.6, 1.6, 1.4], (20, 40, 60, 80), 2.0),  # a longer run
        ([None, 1.4, 1.0, 0.9], (10, 20, 30, 40), 0.5),
    ):
        run = with_curves(primum, losses, *steps)
        for axis in ("step", "seconds"):
            assert until_base(run, plain, axis) == pytest.approx(share)
    assert until_base(primum, plain, "step") is None
    found = only([plain, run]).interval("primum", "steps_to_base")
    assert found is not None
    assert found.mean == 0.5


def test_times_are_relative_to_base_of_the_same_seed() -> None:
    runs = [record("base", 0, 0.5, ms=10.0), record("base", 1, 0.5, ms=20.0)]
    runs += [record("primum", 0, 0.5, ms=15.0), record("primum", 1, 0.5, ms=30.0)]
    found = only(runs).interval("primum", "time_ratio")
    assert found is not None
    assert (found.mean, found.half_width) == (1.5, 0.0)


def test_times_of_two_machines_are_not_compared() -> None:
    fast = {"processor": "A", "instructions": "AVX512", "torch": "2.13.0"}
    base = replace(record("base", 0, 0.5, ms=10.0), environment=fast)
    primum = replace(record("primum", 0, 0.5, ms=15.0), environment=fast | {"torch": "2.14.0"})
    assert metrics_of(primum, base)["time_ratio"] == 1.5
    slow = replace(primum, environment=fast | {"instructions": "AVX2"})
    found = metrics_of(slow, base)
    assert found["time_ratio"] is None
    assert found["time_to_base"] is None
    assert found["steps_to_base"] == metrics_of(primum, base)["steps_to_base"]


def test_differences_over_common_seeds_are_a_family(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0, "permuted": 3.0, "focal": 0.0})
    group = only([run for run in runs if (run.arm, run.seed) != ("permuted", 0)])
    base = [80.0, 80.1, 80.2]
    pairs = {
        "primum": ([each + 2 for each in base], base),
        "permuted": ([each + 3 for each in base[1:]], base[1:]),
        "focal": (base, base),
    }
    expected, found = family(pairs), group.against_base("accuracy")
    assert list(found) == list(expected)
    for arm, test in found.items():
        assert test.interval.count == len(pairs[arm][0])
        assert test.adjusted_p == pytest.approx(expected[arm].adjusted_p)
    others = group.focus_against("accuracy")
    assert {arm: round(test.interval.mean) for arm, test in others.items()} == {
        "permuted": -1,
        "focal": 2,
    }


def test_an_arm_with_a_diverged_seed_is_not_compared(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0})
    runs[-1] = replace(runs[-1], final={"test_accuracy": None})
    assert only(runs).against_base("accuracy") == {}


def test_summaries_are_plain_values(make_runs: MakeRuns) -> None:
    content = only(make_runs({"base": 0.0, "primum": 2.0}, seeds=1)).summary()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    base, primum = content["arms"]
    assert base["accuracy"] == {"mean": pytest.approx(80.0), "half_width": None, "count": 1}
    assert primum["accuracy_test"]["interval"]["mean"] == pytest.approx(2.0)
    assert base["accuracy_test"] is base["ema_accuracy"] is None
