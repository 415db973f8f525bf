"""The page: complete, well formed, and alone in the world."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from primum.experiments.report import render
from primum.experiments.summary import summarise

from .conftest import MakeResults

VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Checks that tags close in order; collects identifiers and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def page(make_results: MakeResults) -> str:
    results = make_results()
    return render(results, [summarise(results, recipe) for recipe in results.recipes])


def test_nothing_comes_from_outside(page: str) -> None:
    assert "http" not in page
    assert "//" not in re.sub(r"/\*.*?\*/", "", page)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)


def test_well_formed_with_names_used_once_and_found(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(reader.ids)


def test_has_verdict_table_figures_and_settings(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    text = " ".join(reader.words)
    assert "no difference could be seen" in text
    assert page.count("<svg") == page.count("<figure>") == 8
    assert "test accuracy, %" in text
    assert "80.1" in text
    for arm in ("base", "primum", "permuted", "lr-matched"):
        assert f"<td>{arm}</td>" in page
    assert "primum demo --seeds 3" in text
    assert "torch" in text
    assert "seeds" in text


def test_pictures_take_the_pages_ink(page: str) -> None:
    assert "currentColor" in page
    assert "#010203" not in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("gains", [{"base": 0.0}, {"base": 0.0, "primum": 1.0}])
@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_arms_and_seeds(
    gains: dict[str, float], seeds: int, make_results: MakeResults
) -> None:
    results = make_results(gains, seeds=seeds)
    page = render(results, [summarise(results, recipe) for recipe in results.recipes])
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
