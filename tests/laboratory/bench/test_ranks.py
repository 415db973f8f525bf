"""The benchmark of several ranks runs, and its formula is what the library sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import ranks

RESULTS = Path(__file__).resolve().parents[3] / "lab" / "bench" / "results" / "ranks.json"


def test_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranks.json"
    arguments = ["--quick", "--processes", "2", "--out", str(out)]
    assert ranks.main(arguments) == 0
    content = json.loads(out.read_text())
    rows = content["results"]
    assert [(row["optimizer"], row["way"]) for row in rows] == [
        (optimizer, way) for optimizer in ("sgd", "adamw") for way in ("local", "gather", "sum")
    ]
    for row in rows:
        assert row["payload"] == row["payload_formula"]
        assert (row["payload"] > 0) == (row["way"] != "local")
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["held"] > 0
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "Payload: 6 of 6 rows" in capsys.readouterr().out
    assert "Payload: 6 of 6 rows" in out.with_suffix(".md").read_text()


def test_measured_bytes_are_those_of_the_formula() -> None:
    """In the stored results, but for gloo's framing of every collective."""
    rows = json.loads(RESULTS.read_text())["results"]
    assert {row["ranks"] for row in rows} == {1, 2, 4}
    for row in rows:
        assert row["payload"] == row["payload_formula"]
        if row["wire"] is not None:
            framing = row["wire"] - row["wire_formula"]
            assert 0 <= framing <= 576 * row["collectives"] * (row["ranks"] - 1)
