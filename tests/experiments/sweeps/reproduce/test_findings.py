"""Reproduced, not reproduced, not run."""

from __future__ import annotations

import json

import pytest

from primum.experiments.statistics import difference, smallest_effect
from primum.experiments.sweeps.reproduce.findings import (
    Finding,
    Outcome,
    Status,
    as_json,
    beside,
    judge,
    judge_gain,
    markdown,
    text_table,
)
from primum.experiments.sweeps.summary import AgainstBase

BASE = [50.0, 51.0, 49.0]


def gain(by: float, count: int = 3) -> AgainstBase:
    mine = [value + by for value in BASE[:count]]
    change = difference(mine, BASE[:count])
    return AgainstBase(change, change.welch_p, smallest_effect(mine, BASE[:count]))


def outcome(*statuses: Status) -> Outcome:
    findings = tuple(Finding("a claim", "1", "2", status, "why") for status in statuses)
    return Outcome("table1", "Table 1", "small", findings, "primum reproduce", {"torch": "x"})


@pytest.mark.parametrize(
    ("paper", "test", "status", "note"),
    [
        (0.2, gain(5.0), "reproduced", ""),
        (-0.2, gain(-5.0), "reproduced", ""),
        (0.2, gain(-5.0), "not reproduced", "the other way round"),
        (0.2, gain(0.5), "not reproduced", "not seen; 3 seeds could have seen"),
        (0.2, gain(5.0, count=1), "not judged", "one seed"),
        (0.2, None, "not run", ""),
    ],
)
def test_gains(paper: float, test: AgainstBase | None, status: str, note: str) -> None:
    found, why = judge_gain(paper, test, "small")
    assert found == status
    assert note in why


def test_smoke_is_not_judged() -> None:
    assert judge_gain(0.2, gain(5.0), "smoke")[0] == "not judged"
    assert judge(True, "smoke") == "not judged"
    assert (judge(True, "small"), judge(False, "full")) == ("reproduced", "not reproduced")


def test_ours_is_told_beside_and_never_counted() -> None:
    assert beside(gain(5.0), "small") == ("not judged", "higher than base, Holm p 0.004")
    assert beside(gain(-5.0), "small") == ("not judged", "lower than base, Holm p 0.004")
    assert "no difference seen; could have seen" in beside(gain(0.1), "small")[1]
    assert beside(None, "small")[0] == "not run"


def test_verdict_counts_what_was_judged() -> None:
    some = outcome("reproduced", "not reproduced", "not run", "not judged")
    assert some.verdict == "1 of 2 reproduced, 1 not run"
    assert outcome("not run").verdict == "not run"
    assert outcome("not judged", "not run").verdict == "not judged"


def test_verdict_says_what_is_left_after_holm() -> None:
    findings = tuple(
        Finding("a claim", "1", "2", status, adjusted_p=p)
        for status, p in (("reproduced", 0.04), ("reproduced", 0.06), ("not reproduced", 0.01))
    )
    told = Outcome("table1", "Table 1", "small", findings, "primum reproduce", {}).verdict
    assert told == "2 of 3 reproduced, 1 of them after Holm's correction for all of them"


def test_pages() -> None:
    page = markdown(outcome("reproduced", "not run"))
    assert "| a claim | 1 | 2 | reproduced | why |" in page
    assert "primum reproduce" in page
    assert json.loads(as_json(outcome("reproduced")))["verdict"] == "1 of 1 reproduced"
    lines = text_table(outcome("reproduced").findings).splitlines()
    assert lines[1].split() == ["a", "claim", "1", "2", "reproduced", "why"]
