"""Numbers and tables as text."""

from __future__ import annotations

import math

from lab.formatting import arm_rows, p_value, show, summary_page
from lab.statistics import RULE, Interval
from lab.tables import group_runs
from lab.text_tables import markdown_table, text_table
from laboratory.conftest import MakeRuns, as_language, record


def test_numbers() -> None:
    assert show(Interval(1.234, 0.5, 3), 1) == "1.2 ± 0.5"
    assert show(Interval(1.234, math.nan, 1), 2, sign="+") == "+1.23"
    assert show(None, 1) == "–"
    assert [p_value(p) for p in (0.0001, 0.04, math.nan)] == ["<0.001", "0.040", "–"]


def test_tables() -> None:
    rows = [["", "a"], ["first", "1.0"], ["b", "20.0"]]
    assert text_table(rows) == "          a\nfirst   1.0\nb      20.0"
    ruled = text_table([["name", "n"], ["a", "1"], ["b", "20"]], left=None, rule=True)
    assert ruled == "name   n\n--------\na      1\nb     20"
    assert markdown_table(["x", "n"], [["a", "1"]]) == "| x | n |\n| --- | ---: |\n| a | 1 |"


def test_rows_have_only_columns_with_numbers(make_runs: MakeRuns) -> None:
    (group,) = group_runs(make_runs({"base": 0.0, "primum": 2.0}))
    head, base, primum = arm_rows(group)
    assert head == ["", "test acc %", "vs base", "Holm p", "could see", "test loss", "vs base",
                    "Holm p", "harmed %", "taken %", "extra w"]  # fmt: skip
    assert base[:5] == ["base", "80.10 ± 0.25", "–", "–", "–"]
    assert primum[1:4] == ["82.10 ± 0.25", "+2.00 ± 0.23", "<0.001"]


def test_rows_of_language_models_have_no_accuracy(make_runs: MakeRuns) -> None:
    (group,) = group_runs(as_language(make_runs({"base": 0.0, "primum": 0.02})))
    head, base, primum = arm_rows(group)
    assert head[:5] == ["", "loss, nats", "vs base", "Holm p", "could see"]
    assert base[1] == "1.201 ± 0.002"
    assert primum[2:5] == ["-0.002 ± 0.002", "0.070", "0.004"]


def test_the_page_says_the_rule_and_the_command() -> None:
    runs = [record(arm, seed, 0.5) for arm in ("base", "primum") for seed in range(2)]
    page = summary_page(group_runs(runs), "primum compare --x", "Ours")
    assert page.startswith("# Ours\n\n## a model\n\n|  | test acc %")
    assert RULE in page
    assert "```sh\nprimum compare --x\n```" in page
    assert "Settings: lr 0.1." in page
