"""The benchmark of several ranks runs, and the page on scale says what the library computes now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results" / "ranks.json"

Load = Callable[[str], ModuleType]


def test_ranks(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranks.json"
    arguments = ["--quick", "--processes", "2", "--out", str(out)]
    assert load("ranks").main(arguments) == 0
    content = json.loads(out.read_text())
    rows = content["results"]
    assert [(row["optimizer"], row["way"]) for row in rows] == [
        (optimizer, way)
        for optimizer in ("sgd", "adamw")
        for way in ("local", "gather", "rows", "sum")
    ]
    for row in rows:
        assert row["payload"] == row["payload_formula"]
        assert (row["payload"] > 0) == (row["way"] != "local")
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0.5 < row["held"] / row["held_model"] < 2
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "Payload: 8 of 8 rows" in capsys.readouterr().out
    assert "Payload: 8 of 8 rows" in out.with_suffix(".md").read_text()


def test_measured_bytes_are_those_of_the_formula() -> None:
    """In the results that the page shows, but for gloo's framing of every collective."""
    rows = json.loads(RESULTS.read_text())["results"]
    assert {row["ranks"] for row in rows} == {1, 2, 4}
    for row in rows:
        assert row["payload"] == row["payload_formula"]
        if row["wire"] is not None:
            framing = row["wire"] - row["wire_formula"]
            assert 0 <= framing <= 576 * row["collectives"] * (row["ranks"] - 1)


def test_formulas_follow_the_librarys_own_traffic(load: Load) -> None:
    """It leaves out what is small, and counts one product more than there are."""
    scale = load("_scale")
    case = scale.Case(768, 1000, 8192, ranks=16)
    for way, tolerance in (("gather", 1e-3), ("rows", 1e-3), ("sum", 0.06)):
        assert scale.sent(way, case).wire == pytest.approx(
            scale.sizes_of(case).traffic()[way], rel=tolerance
        )


def test_dearer_collectives_favour_gathering(load: Load) -> None:
    scale = load("_scale")
    case = scale.Case(64, 10, 4096, ranks=8)
    assert scale.chosen(case) == scale.chosen_at(case, 30, 50_000_000)
    assert scale.chosen_at(case, 0, 1e12) == "gather"
    assert scale.chosen_at(case, 1e12, 0) == "sum"


def test_rows_take_the_place_of_sums_but_for_many_samples(load: Load) -> None:
    scale = load("_scale")
    for ranks in (8, 64, 1024):
        assert scale.chosen(scale.Case(768, 1000, 8192, ranks, "adamw")) == "rows"
        assert scale.chosen(scale.Case(768, 1000, 262_144, ranks, "adamw")) == "sum"
        long = scale.Case(4096, 32_000, 1024, ranks, "adamw", positions=2048)
        assert scale.sharded(long, None) == "sum"
