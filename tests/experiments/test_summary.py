"""The table: the last epoch counts, and base's share of harmed samples is the plain step's."""

from __future__ import annotations

import pytest

from primum.experiments.summary import show, summarise, text_table

from .conftest import MakeResults


def test_rows(make_results: MakeResults) -> None:
    summary = summarise(make_results(), "cnn-sgd")
    rows = {row.arm: row for row in summary.rows}
    assert list(rows) == ["base", "primum", "permuted", "lr-matched"]
    assert rows["base"].accuracy.mean == pytest.approx(80.1)
    assert rows["base"].harmed_after == rows["base"].harmed_before
    primum_after = rows["primum"].harmed_after
    assert primum_after is not None
    assert primum_after.mean == pytest.approx(25.0)
    assert rows["permuted"].harmed_after is None
    assert rows["base"].extra_weight is None
    assert rows["primum"].time_ratio.mean == 1.0


def test_comparisons_are_primum_minus_the_other(make_results: MakeResults) -> None:
    summary = summarise(make_results({"base": 0.0, "primum": 2.0, "permuted": 3.0}), "cnn-sgd")
    means = {c.other: c.accuracy.paired.mean for c in summary.comparisons}
    assert means == pytest.approx({"base": 2.0, "permuted": -1.0})


def test_base_alone_has_nothing_to_compare(make_results: MakeResults) -> None:
    assert summarise(make_results({"base": 0.0}), "cnn-sgd").comparisons == ()


def test_text_table_lines_up(make_results: MakeResults) -> None:
    lines = text_table(summarise(make_results(), "cnn-sgd")).splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert "80.1 ± 0.2" in lines[1]


def test_show_without_interval(make_results: MakeResults) -> None:
    summary = summarise(make_results(seeds=1), "cnn-sgd")
    assert show(summary.rows[0].accuracy, 1) == "80.0"
    assert show(None, 1) == "–"
