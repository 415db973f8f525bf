"""Tables against numbers worked out by hand and by scipy."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from experiments.sweeps.conftest import record
from primum.experiments.report import render_runs
from primum.experiments.runs import RunRecord
from primum.experiments.statistics import smallest_effect
from primum.experiments.sweeps.summary import as_json, summarise
from primum.experiments.sweeps.table import text_table

BASE = [0.50, 0.52, 0.51, 0.49]
PRIMUM = [0.56, 0.58, 0.55, 0.57]
PERMUTED = [0.50, 0.53, 0.50, 0.50]


@pytest.fixture
def records() -> list[RunRecord]:
    made = []
    for seed in range(4):
        made += [
            record("base", seed, BASE[seed], losses=(2.0, 1.0), ms=10.0),
            record("primum", seed, PRIMUM[seed], losses=(1.0, 0.8), ms=12.0),
            record("permuted", seed, PERMUTED[seed], losses=(2.0, 1.1), ms=12.0),
        ]
    return made


def test_means_and_tests(records: list[RunRecord]) -> None:
    (summary,) = summarise(records)
    primum, permuted = summary.arm("primum"), summary.arm("permuted")
    assert primum.accuracy is not None
    assert primum.accuracy.mean == pytest.approx(56.5)
    assert primum.seeds == (0, 1, 2, 3)
    welch = stats.ttest_ind(PRIMUM, BASE, equal_var=False).pvalue
    other = stats.ttest_ind(PERMUTED, BASE, equal_var=False).pvalue
    assert primum.accuracy_test is not None
    assert permuted.accuracy_test is not None
    assert primum.accuracy_test.change.welch_p == pytest.approx(welch)
    assert primum.accuracy_test.change.paired_p == pytest.approx(
        stats.ttest_rel(PRIMUM, BASE).pvalue
    )
    assert primum.accuracy_test.adjusted_p == pytest.approx(2 * welch)  # Holm, two arms
    assert permuted.accuracy_test.adjusted_p == pytest.approx(other)
    own = [100 * value for value in PRIMUM], [100 * value for value in BASE]
    assert primum.accuracy_test.smallest == pytest.approx(smallest_effect(*own, family=2))
    assert primum.accuracy_test.verdict == "higher"
    assert permuted.accuracy_test.verdict == "not seen"
    assert summary.arm("base").accuracy_test is None


def test_time_and_steps_to_base(records: list[RunRecord]) -> None:
    (summary,) = summarise(records)
    primum, permuted = summary.arm("primum"), summary.arm("permuted")
    assert primum.time_ratio is not None
    assert primum.time_ratio.mean == pytest.approx(1.2)
    assert primum.steps_to_base is not None
    assert primum.steps_to_base.mean == pytest.approx(0.5)  # after the first of two epochs
    assert primum.time_to_base is not None
    assert primum.time_to_base.mean == pytest.approx(0.6)
    assert permuted.steps_to_base is None  # never got there


def test_harm_and_weights(records: list[RunRecord]) -> None:
    (summary,) = summarise(records)
    base, primum = summary.arm("base"), summary.arm("primum")
    assert primum.harmed_plain is not None
    assert primum.harmed_taken is not None
    assert (primum.harmed_plain.mean, primum.harmed_taken.mean) == pytest.approx((40.0, 30.0))
    assert primum.extra_weight is not None
    assert primum.extra_weight.mean == pytest.approx(0.2)
    assert base.harmed_taken == base.harmed_plain
    assert base.extra_weight is None


def test_only_seeds_that_both_have_are_compared(records: list[RunRecord]) -> None:
    cut = [run for run in records if (run.arm, run.seed) != ("base", 3)]
    test = summarise(cut)[0].arm("primum").accuracy_test
    assert test is not None
    assert test.change.welch.count == 3


def test_one_seed(records: list[RunRecord]) -> None:
    test = summarise(records[:3])[0].arm("primum").accuracy_test
    assert test is not None
    assert test.verdict == "one seed"


def test_a_run_that_diverged_has_no_figures(records: list[RunRecord]) -> None:
    gone = record("base", 0, 0.1, losses=(2.0, 1.0))
    for name in ("test_loss", "test_accuracy"):
        gone.final[name] = None
        gone.curves[name][-1] = None
    (summary,) = summarise([gone, *records[1:]])
    assert summary.arm("base").loss is None
    assert summary.arm("primum").steps_to_base is None
    assert summary.arm("base").accuracy is None
    assert summary.arm("primum").accuracy is not None
    for arm in ("primum", "permuted"):  # the lost seed is not left out of the test: there is none
        assert summary.arm(arm).loss_test is None
        assert summary.arm(arm).accuracy_test is None
    assert "–" in text_table(summary)
    assert "<svg" in render_runs([gone, *records[1:]])


def test_json_has_no_nan(records: list[RunRecord]) -> None:
    content = json.loads(as_json(summarise(records[:3]), "primum compare"))
    (setting,) = content["settings"]
    assert [arm["arm"] for arm in setting["arms"]] == ["base", "primum", "permuted"]
    assert setting["arms"][1]["accuracy"]["half_width"] is None
