"""What a reader sees."""

from __future__ import annotations

import pytest

from experiments.sweeps.conftest import record
from primum.experiments.sweeps.summary import SettingSummary, summarise
from primum.experiments.sweeps.table import markdown, rows, text_table


@pytest.fixture
def summary() -> SettingSummary:
    runs = [record("base", seed, 0.5 + seed / 100, ms=10.0) for seed in range(3)]
    runs += [record("primum", seed, 0.6 + seed / 100, ms=11.0) for seed in range(3)]
    return summarise(runs)[0]


def test_cells(summary: SettingSummary) -> None:
    head, base, primum = rows(summary)
    cells = dict(zip(head, primum, strict=True))
    assert primum[:3] == ["primum", "61.00 ± 2.48", "+10.00 ± 2.27"]
    assert cells["time x"] == "1.10"
    assert cells["harmed %"] == "40.0"
    assert base[2] == "–"
    assert "<0.001" in primum


def test_columns_without_figures_are_left_out() -> None:
    head, *_ = rows(summarise([record("base", 0, 0.5)])[0])
    assert "Holm p" not in head
    assert "test acc %" in head


def test_averaged_weights_are_shown_and_tested() -> None:
    runs = [
        record(arm, seed, 0.5, ema_test_accuracy=value + seed / 100)
        for arm, value in (("base", 0.5), ("primum", 0.6))
        for seed in range(3)
    ]
    head, _, primum = rows(summarise(runs)[0])
    place = head.index("EMA acc %")
    assert primum[place : place + 3] == ["61.00 ± 2.48", "+10.00 ± 2.27", "<0.001"]
    assert "EMA acc %" not in rows(summarise([record("base", 0, 0.5)])[0])[0]


def test_columns_line_up(summary: SettingSummary) -> None:
    lines = text_table(summary).splitlines()
    assert len(lines) == 3
    assert lines[0].index("test acc %") + len("test acc %") == lines[1].index("51.00 ± 2.48") + 12


def test_markdown_is_a_table_with_its_command(summary: SettingSummary) -> None:
    page = markdown([summary], "primum compare --seeds 3", "A title")
    assert page.startswith("# A title\n")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "primum compare --seeds 3" in page
    assert "lr 0.1" in page
