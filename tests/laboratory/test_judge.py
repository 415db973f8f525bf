"""Reproduced, not reproduced, not run."""

from __future__ import annotations

import json

import pytest

from lab.claims import Statement
from lab.judge import Finding, Outcome, Status, judge_gain, judge_statement
from lab.statistics import Difference, family

BASE = [50.0, 51.0, 49.0]


def gain(by: float, count: int = 3, tests: int = 1) -> Difference:
    pair = [value + by for value in BASE[:count]], BASE[:count]
    return family({0: pair} | dict.fromkeys(range(1, tests), (BASE, BASE)))[0]


@pytest.mark.parametrize(
    ("paper", "test", "status", "note"),
    [
        (0.2, gain(5.0), "reproduced", "higher than base, Holm p 0.004"),
        (-0.2, gain(-5.0), "reproduced", "lower than base, Holm p 0.004"),
        (0.2, gain(-5.0), "not reproduced", "lower than base"),
        (0.2, gain(0.5), "not reproduced", "no difference seen; 3 seeds could see 3."),
        (0.2, gain(5.0, tests=20), "not reproduced", "no difference seen"),  # Holm
        (0.2, gain(5.0, count=1), "not judged", "one seed"),
        (0.2, None, "not run", ""),
        (None, gain(5.0), "not judged", "higher than base"),
        (None, gain(0.1), "not judged", "no difference seen"),
    ],
)
def test_gains(paper: float | None, test: Difference | None, status: str, note: str) -> None:
    found = judge_gain("a cell", "1 -> 2", paper, test, "3 -> 4", "small")
    assert found.status == status
    assert note in found.note


@pytest.mark.parametrize(
    ("value", "status"), [(0.5, "reproduced"), (0.4, "not reproduced"), (None, "not run")]
)
def test_statements(value: float | None, status: str) -> None:
    statement = Statement("harm removed", "substantial", least=0.45)
    found = judge_statement("net: ", statement, value, "50%", "small", "why")
    assert (found.claim, found.paper, found.status) == ("net: harm removed", "substantial", status)


def test_smoke_is_not_judged() -> None:
    assert judge_gain("c", "", 0.2, gain(5.0), "", "smoke").status == "not judged"
    assert judge_statement("", Statement("c", ""), 1.0, "", "smoke").status == "not judged"


def outcome(*statuses: Status) -> Outcome:
    findings = tuple(Finding("a claim", "1", "2", status, "why") for status in statuses)
    return Outcome("table1", "Table 1", "small", findings, "primum reproduce", {"torch": "x"})


def test_verdict_counts_what_was_judged() -> None:
    some = outcome("reproduced", "not reproduced", "not run", "not judged")
    assert some.verdict == "1 of 2 reproduced, 1 not run"
    assert outcome("not run").verdict == "not run"
    assert outcome("not judged", "not run").verdict == "not judged"


def test_pages() -> None:
    page = outcome("reproduced", "not run").page()
    assert "| a claim | 1 | 2 | reproduced | why |" in page
    assert "primum reproduce" in page
    assert json.loads(outcome("reproduced").json())["verdict"] == "1 of 1 reproduced"
    assert "a claim  1      2     reproduced  why" in outcome("reproduced").text()
