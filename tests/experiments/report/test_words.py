"""Sentences follow from intervals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primum.experiments.report.groups import Group, group_runs
from primum.experiments.report.words import details, headline, whole_network
from primum.experiments.runs import RunRecord

from .conftest import MakeRuns


def only(runs: list) -> Group:
    (group,) = group_runs(runs)
    return group


def test_a_gain_is_told_with_its_interval(make_runs: MakeRuns) -> None:
    said = headline(only(make_runs({"base": 0.0, "primum": 2.0})))
    assert said == (
        "Primum against base: test accuracy, higher by 2.0 points (95% interval +2.0 to +2.0); "
        "test loss, lower by 0.200 (95% interval -0.200 to -0.200)."
    )


def test_no_difference_is_told_as_such(make_runs: MakeRuns) -> None:
    said = headline(only(make_runs({"base": 0.0, "primum": 0.0})))
    assert (
        said
        == "Between primum and base no difference could be seen in test accuracy and test loss."
    )


def test_harm_is_told_too(make_runs: MakeRuns) -> None:
    assert "lower by 3.0 points" in headline(only(make_runs({"base": 0.0, "primum": -3.0})))


@pytest.mark.parametrize(
    ("control", "words"), [(0.0, "also higher"), (2.0, "so the cause is open"), (3.0, "is open")]
)
def test_a_control_that_does_as_well_leaves_the_cause_open(
    control: float, words: str, make_runs: MakeRuns
) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0, "permuted": control})
    assert words in headline(only(runs))


def test_what_cannot_be_said(make_runs: MakeRuns) -> None:
    assert "Only base was run" in headline(only(make_runs({"base": 0.0})))
    alone = only(make_runs({"primum": 0.0}))
    assert "Only primum was run" in headline(alone)
    assert "with the weights primum gave, 25%" in details(alone)[0]
    assert "One seed" in headline(only(make_runs({"base": 0.0, "primum": 1.0}, seeds=1)))
    assert "no finished run of base" in headline(only(make_runs({"paper": 0.0, "primum": 1.0})))
    runs = make_runs({"base": 0.0, "primum": 1.0}, final={})
    assert "No test figures" in headline(only(runs))


def test_details_name_harm_controls_and_runs_cut_short(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0, "lr-matched": 0.0})
    runs[-1] = replace(runs[-1], complete=False)
    said = details(only(runs))
    assert "a learning rate raised by the same mean factor: test accuracy, higher" in said[0]
    assert said[1].endswith("would have raised the loss of 40% of a batch's samples.")
    assert "40% of a batch's samples; with the weights primum gave, 25%" in said[2]
    assert said[3] == "1 of 9 runs did not reach their end: not counted."


def test_the_whole_network_in_a_sentence(full: RunRecord) -> None:
    said = headline(only([full]))
    assert said == whole_network(only([full]))
    assert said.startswith("At step 20 the coming step raises the loss of 45% of its own batch")
    assert "remove 30%, the same weights shuffled -10%" in said
