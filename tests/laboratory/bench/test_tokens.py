"""The benchmark of per-token weights measures what it says, on a small scale."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from lab.bench import tokens


def test_tables(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tokens, "SETTINGS", [tokens.Setting(100, 16, 8, 16, 160)])
    monkeypatch.setattr(tokens, "GPTS", {"124M": tokens.GPTS["124M"]})
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choices("a step helps", k=20_000)))
    out = tmp_path / "tokens.json"
    small = ["--vocabularies", "100", "--tokens", "1024"]
    parts = ["--parts", "quality", "operations"]
    assert tokens.main(["--text", str(text), *small, *parts, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert str(tmp_path) not in json.dumps(content)
    quality = content["quality"]["results"]
    for kind in ("sgd", "adamw"):
        rows = [r for r in quality if r["optimizer"] == kind and r["variant"] == "library"]
        assert rows
        assert all(0.5 < row["removed"] < 1.5 and 0 < row["exact"] <= 1 for row in rows)
        assert all(row["feasible"] <= 1.01 for row in rows)  # the exact answer is the best
    by_head = [row for row in content["operations"]["results"] if "tokens" in row]
    assert all(4 < row["added"] <= row["exact"] for row in by_head)
    large = [row for row in by_head if row["head"] == "768 x 32,000"]
    assert len(large) == 2
    assert all(row["approximate"] and row["added"] <= 5 for row in large)
    gpts = [row for row in content["operations"]["results"] if row.get("gpt") == "124M"]
    assert all(row["share"] < 0.25 for row in gpts)
    assert "### quality" in out.with_suffix(".md").read_text()
    assert "added / N H" in capsys.readouterr().out


def test_time() -> None:
    small = tokens.Setting(100, 8, 2, 8, 1)
    args = argparse.Namespace(steps=1, settings=[small], seconds=0.5)
    rows = tokens.seconds("a step helps " * 50, args)
    assert [row["optimizer"] for row in rows] == ["sgd", "adamw"]
    for row in rows:
        assert row["rounds"] >= 5
        assert row["ms"]["exact"] > 0
        assert row["ms"]["plain"] > 0
    ((_, lines),) = tokens.seconds_tables(rows).values()
    assert len(lines) == 2


def test_operations_of_a_step_are_those_of_its_products() -> None:
    """Six per entry of a weight and token, but for the embedding and attention."""
    layers, width, words = 2, 64, 500
    found = tokens.step_of(layers, width, 4, words, 1)
    weights = layers * 12 * width * width + width * words
    attention = layers * 3 * 4 * 1024 * width
    assert found == pytest.approx(1024 * (6 * weights + attention), rel=0.1)


def test_text_and_words(tmp_path: Path) -> None:
    file = tmp_path / "verses.txt"
    file.write_text("Ge1:1 In the beginning\n1Jn2:3 the end\n")
    assert tokens.read_text(file) == "In the beginning\nthe end\n"
    assert len(tokens.read_text(None)) > 100_000
    numbers = tokens.numbered("b b b a a c d", 1000)
    assert torch.equal(numbers[:5], torch.tensor([0, 0, 0, 1, 1]))
    rare = tokens.numbered("b b b a a c d " * 3, 8193)
    assert rare.max() < 8193
