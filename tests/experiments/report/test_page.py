"""The page of any runs: complete, well formed, alone in the world."""

from __future__ import annotations

import re

import pytest

from primum.experiments.report import render_runs
from primum.experiments.runs import RunRecord

from .conftest import MakeRuns
from .reader import check_alone_and_whole


def test_comparison(make_runs: MakeRuns) -> None:
    reader = check_alone_and_whole(render_runs(make_runs({"base": 0.0, "primum": 2.0})))
    for words in (
        "Primum against base: test accuracy, higher by 2.0 points",
        "A difference is called one only when",
        "80.1",
        "minus base",
        "made <up>",
        "of a kind",
        "primum inspect --seed 2",
    ):
        assert words in reader.text
    assert reader.tags.count("svg") == 4


def test_everything_a_run_can_have(full: RunRecord) -> None:
    page = render_runs([full], title="A < B")
    reader = check_alone_and_whole(page)
    assert reader.tags.count("svg") == 13
    assert "A < B" in reader.text
    assert "Whole network at step 20" in reader.text
    assert page.count("<details open>") == 1
    assert page.count("<details>") == 2
    assert "A difference is called one" not in reader.text  # there is none to call


def test_a_bare_run_makes_a_page() -> None:
    reader = check_alone_and_whole(render_runs([RunRecord("n", "base", 0)]))
    assert "nothing to compare" in reader.text
    assert "svg" not in reader.tags


def test_several_groups_have_their_own_pictures() -> None:
    curves = {"epoch": [1, 2], "test_loss": [2.0, 1.0]}
    runs = [RunRecord(name, "base", 0, curves=curves) for name in ("one", "two")]
    reader = check_alone_and_whole(render_runs(runs))
    assert reader.tags.count("svg") == 2


@pytest.mark.parametrize(
    ("gains", "seeds"), [({"base": 0.0, "primum": 1.0}, 1), ({"base": 0.0}, 2), ({"mine": 0.0}, 1)]
)
def test_no_figure_is_not_a_number(gains: dict, seeds: int, make_runs: MakeRuns) -> None:
    page = render_runs(make_runs(gains, seeds=seeds))
    assert not re.search(r"\bnan\b", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))


def test_environments_that_differ_are_both_told() -> None:
    runs = [RunRecord("n", "base", 0, environment={"torch": "2.12"})]
    runs += [RunRecord("n", "primum", 0, environment={"torch": "2.13"})]
    assert "2.12; 2.13" in check_alone_and_whole(render_runs(runs)).text
