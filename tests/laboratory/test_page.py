"""The page of any runs: complete, well formed, self-contained."""

from __future__ import annotations

import re

import pytest

from lab.page import render
from lab.runs import RunRecord
from laboratory.conftest import MakeRuns, as_language
from laboratory.reader import check_alone_and_whole


def test_comparison(make_runs: MakeRuns) -> None:
    reader = check_alone_and_whole(render(make_runs({"base": 0.0, "primum": 2.0})))
    for words in (
        "Primum compared with base: test accuracy higher by 2.0 points",
        "Two arms are said to differ only if",
        "80.1",
        "primum - base",
        "made <up>",
        "of a kind",
        "primum inspect --seed 2",
    ):
        assert words in reader.text
    assert reader.tags.count("svg") == 4


def test_language_models_are_shown_by_their_loss(make_runs: MakeRuns) -> None:
    page = render(as_language(make_runs({"base": 0.0, "primum": 2.0})))
    reader = check_alone_and_whole(page)
    assert "held-out loss, nats per token" in reader.text
    assert "-0.2000" in reader.text
    assert "accuracy" not in reader.text
    assert "test loss, nats per token" in page  # the axis of the curves


def test_everything_a_run_can_have(full: RunRecord) -> None:
    page = render([full], title="A < B")
    reader = check_alone_and_whole(page)
    assert reader.tags.count("svg") == 13
    assert "A < B" in reader.text
    assert "Whole network at step 20" in reader.text
    assert page.count("<details open>") == 1
    assert page.count("<details>") == 2
    assert "Two arms are said to differ" not in reader.text  # there is nothing to compare


def test_a_bare_run_makes_a_page() -> None:
    reader = check_alone_and_whole(render([RunRecord("n", "base", 0)]))
    assert "nothing to compare" in reader.text
    assert "svg" not in reader.tags


def test_several_groups_have_their_own_pictures() -> None:
    curves = {"epoch": [1, 2], "test_loss": [2.0, 1.0]}
    runs = [RunRecord(name, "base", 0, curves=curves) for name in ("one", "two")]
    reader = check_alone_and_whole(render(runs))
    assert reader.tags.count("svg") == 2


@pytest.mark.parametrize(
    ("gains", "seeds"), [({"base": 0.0, "primum": 1.0}, 1), ({"base": 0.0}, 2), ({"mine": 0.0}, 1)]
)
def test_no_figure_is_not_a_number(gains: dict, seeds: int, make_runs: MakeRuns) -> None:
    page = render(make_runs(gains, seeds=seeds))
    assert not re.search(r"\bnan\b", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))


def test_environments_that_differ_are_both_listed() -> None:
    runs = [RunRecord("n", "base", 0, environment={"torch": "2.12"})]
    runs += [RunRecord("n", "primum", 0, environment={"torch": "2.13"})]
    assert "2.12; 2.13" in check_alone_and_whole(render(runs)).text
