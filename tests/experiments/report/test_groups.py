"""Groups, the table's figures, differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primum.experiments.report.groups import (
    Group,
    accuracy,
    against_others,
    columns,
    extra_weight,
    group_runs,
    harmed_taken,
    over_seeds,
    until_base,
)
from primum.experiments.runs import RunRecord
from primum.experiments.statistics import holm

from .conftest import MakeRuns


def only(runs: list) -> Group:
    (group,) = group_runs(runs)
    return group


def test_base_and_primum_come_first_and_seeds_in_order(make_runs: MakeRuns) -> None:
    runs = make_runs({"permuted": 0.0, "primum": 1.0, "base": 0.0})
    group = only(runs[::-1])
    assert list(group.arms) == ["base", "primum", "permuted"]
    assert [run.seed for run in group.arms["base"]] == group.seeds == [0, 1, 2]
    assert group.focus == "primum"


def test_other_settings_are_another_group_and_told_apart(make_runs: MakeRuns) -> None:
    first = make_runs({"base": 0.0}, settings={"lr": 0.1, "same": 1})
    second = make_runs({"base": 0.0}, settings={"lr": 0.2, "same": 1})
    assert [g.title for g in group_runs(first + second)] == ["a net (lr 0.1)", "a net (lr 0.2)"]


def test_figures_over_seeds_and_only_of_finished_runs(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0})
    found = over_seeds(runs, accuracy)
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(80.1), 3)
    cut = [*runs[:2], replace(runs[2], complete=False)]
    fewer = over_seeds(cut, accuracy)
    assert fewer is not None
    assert (fewer.mean, fewer.count) == (pytest.approx(80.05), 2)
    assert over_seeds([replace(runs[0], final={})], accuracy) is None


def test_harm_of_the_step_taken(make_runs: MakeRuns) -> None:
    base, primum = make_runs({"base": 0.0, "primum": 0.0}, seeds=1)
    assert harmed_taken(base) == pytest.approx(40)
    assert harmed_taken(primum) == pytest.approx(25)
    assert extra_weight(base) is None
    assert extra_weight(primum) == pytest.approx(0.1)
    assert harmed_taken(replace(base, steps={})) is None


def test_only_columns_with_something_in_them(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 0.0}, seeds=2)
    headings = [column.heading for column in columns(only(runs))]
    assert headings == [
        "test accuracy, %",
        "test loss",
        "harmed by plain step, %",
        "harmed by step taken, %",
        "mean extra weight",
    ]
    timed = [replace(r, final=r.final | {"ms_per_step": 2.0 + (r.arm != "base")}) for r in runs]
    group = only(timed)
    ratio = next(c for c in columns(group) if c.heading == "time per step, x base")
    found = over_seeds(group.arms["primum"], ratio.of)
    assert found is not None
    assert found.mean == pytest.approx(1.5)


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
        ([2.0, 1.4, 1.6, 1.5], (10, 20, 30, 40), 1.0),  # not where it only passed by
        ([2.0, 1.6, 1.6, 1.4], (20, 40, 60, 80), 2.0),  # a longer run
        ([None, 1.4, 1.0, 0.9], (10, 20, 30, 40), 0.5),
        ([2.0, 1.4, 1.0, 0.9], (10, 20, 30, 40), 0.5),
    ):
        run = with_curves(primum, losses, *steps)
        for axis in ("step", "seconds"):
            assert until_base(run, plain, axis) == pytest.approx(share)
    assert until_base(primum, plain, "step") is None
    assert until_base(plain, replace(plain, curves={}), "step") is None
    headings = [column.heading for column in columns(only([plain, run]))]
    assert "steps to base's last loss, x base" in headings
    assert "time to base's last loss, x base" in headings


def test_differences_are_the_focus_minus_the_other_over_common_seeds(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0, "permuted": 3.0})
    runs = [run for run in runs if (run.arm, run.seed) != ("permuted", 0)]
    found = {each.other: each for each in against_others(only(runs))}
    assert {other: each.seeds for other, each in found.items()} == {"base": 3, "permuted": 2}
    accuracies = [each.accuracy for each in found.values() if each.accuracy is not None]
    adjusted = holm([change.welch_p for change in accuracies])
    assert [change.adjusted_p for change in accuracies] == adjusted  # one family
    means = {o: each.accuracy.paired.mean for o, each in found.items() if each.accuracy}
    assert means == pytest.approx({"base": 2.0, "permuted": -1.0})


def test_nothing_to_compare(make_runs: MakeRuns) -> None:
    assert against_others(only(make_runs({"base": 0.0}))) == []
    runs = make_runs({"base": 0.0, "mine": 0.0}, final={})
    assert [(a.accuracy, a.loss) for a in against_others(only(runs))] == [(None, None)]
