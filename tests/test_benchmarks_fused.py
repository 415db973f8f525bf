"""The benchmark of fused losses runs, and measures what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch.nn.functional as F


@pytest.fixture
def fused(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("fused")


def test_all_arms(fused: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fused.json"
    sizes = ["--words", "3000", "--width", "64", "--tokens", "512", "--repeats", "1"]
    assert fused.main([*sizes, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    (found,) = content["results"]
    arms = found["arms"]
    assert {"called", "hook", "primum", "paused"} <= arms.keys()
    logits, gradients = (4 * size / (1 << 20) for size in (512 * 3000, 64 * (3000 + 512)))
    assert arms["called"]["peak_mib"] > logits
    assert arms["hook"]["peak_mib"] >= 0.9 * arms["called"]["peak_mib"]
    assert gradients < arms["paused"]["peak_mib"] <= arms["primum"]["peak_mib"] < logits
    # Logits, gradients of weight and hidden states; the logits again; then drift and once more.
    assert arms["called"]["operations"] == pytest.approx(6)
    assert arms["paused"]["operations"] == pytest.approx(8)
    assert 14 < arms["primum"]["operations"] < 15
    assert ("torch" in arms) is hasattr(F, "linear_cross_entropy")
    assert out.with_suffix(".md").read_text().startswith("| vocabulary")
    assert "operations / NH" in capsys.readouterr().out
