"""The benchmark of adapters runs, and the page shows the tables of its committed results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def test_runs_and_writes_whole_files(
    load: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lora = load("lora")
    monkeypatch.setattr(lora, "LAYER_SEEDS", (0,))
    text, out = tmp_path / "text.txt", tmp_path / "lora.json"
    text.write_text("In the beginning was the word. " * 100)
    few = ["--pretraining", "2", "--steps", "16", "--seeds", "2", "--rates", "0.01", "0.001"]
    quick = ["--test-rows", "8", "--seconds", "0", "--out", str(out)]
    assert lora.main(["--text", str(text), *few, *quick]) == 0
    found = json.loads(out.read_text())
    assert str(tmp_path) not in found["environment"]["command"]
    assert found["rate"] in (0.01, 0.001)
    assert set(found["runs"]) == set(lora.ARMS)
    for arm, runs in found["runs"].items():
        assert [run["seed"] for run in runs] == [0, 1]
        if arm != "base":
            assert all(run["fallbacks"] == 0 for run in runs)
            assert all(run["output"] == "base_model.model.lm_head" for run in runs)
            assert runs[0]["loss"] != found["runs"]["base"][0]["loss"]
    first = [row for row in found["layers"] if row["step"] == 0]
    assert {row["part"]: row["correlation"] for row in first}["last lora_A"] == 0
    assert all(row["operations"] > 0 for row in found["price"])
    assert "loss against base" in out.with_suffix(".md").read_text()
    assert "loss against base" in capsys.readouterr().out
    monkeypatch.setattr(lora, "LAYER_SEEDS", (1,))
    assert lora.main(["--text", str(text), *few, *quick, "--layers-only"]) == 0
    again = json.loads(out.read_text())
    assert {row["seed"] for row in again["layers"]} == {1}
    assert again["runs"] == found["runs"]


def test_the_page_shows_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "adapters.md").read_text().splitlines()
    results = (BENCHMARKS / "results" / "lora.md").read_text().splitlines()
    tables = [line for line in results if line.startswith("|")]
    assert len(tables) > 12
    assert not [line for line in tables if line not in page]
