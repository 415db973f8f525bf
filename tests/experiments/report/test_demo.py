"""The demo's page."""

from __future__ import annotations

import re

import pytest

from primum.experiments.report import render
from primum.experiments.summary import summarise

from ..conftest import MakeResults
from .reader import check_alone_and_whole


def test_has_verdict_table_figures_and_settings(make_results: MakeResults) -> None:
    results = make_results()
    page = render(results, [summarise(results, recipe) for recipe in results.recipes])
    reader = check_alone_and_whole(page)
    assert "no difference could be seen, neither in test accuracy" in reader.text
    assert reader.tags.count("svg") == 10
    for words in ("test accuracy, %", "80.1", "primum demo --seeds 3", "torch", "seeds", "1.00"):
        assert words in reader.text
    for arm in ("base", "primum", "permuted", "lr-matched"):
        assert f'<th scope="row">{arm}</th>' in page
    assert "currentColor" in page  # pictures take the page's ink
    assert "#010203" not in page


@pytest.mark.parametrize(
    ("gains", "seeds"), [({"base": 0.0}, 2), ({"base": 0.0, "primum": 1.0}, 1)]
)
def test_fewer_arms_and_seeds(
    gains: dict[str, float], seeds: int, make_results: MakeResults
) -> None:
    results = make_results(gains, seeds=seeds)
    page = render(results, [summarise(results, recipe) for recipe in results.recipes])
    assert "control:" not in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
