"""The benchmark of tied embeddings runs, and its parts of a gradient are those of autograd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tied.md"
PAGE = ROOT / "docs" / "tied.md"


@pytest.fixture
def tied(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("tied")


def test_quick(tied: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tied.json"
    assert tied.main(["--quick", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [(case["text"], case["optimizer"]) for case in cases] == [
        ("characters", "SGD"),
        ("characters", "AdamW"),
    ]
    for case in cases:
        whole = case["found"]["whole"]
        assert whole["step"] < 1e-5  # of what is known nothing is off
        assert whole["drift"] < 1e-5
        assert whole["sign"] == 1
        assert case["found"]["head alone"]["step"] > 1e-3
    assert "known of the gradient" in capsys.readouterr().out


def test_the_shares_of_head_and_embedding(tied: ModuleType) -> None:
    """Against a twin whose embedding is its own."""
    torch.manual_seed(0)
    model, twin = tied.Gpt(12, 5), tied.Gpt(12, 5)
    twin.wte.weight = torch.nn.Parameter(model.wte.weight.detach().clone())
    twin.load_state_dict(model.state_dict())
    windows = torch.randint(12, (3, 6))
    weights = torch.rand(15)
    batch = tied.forward(model, windows)
    own = tied.forward(twin, windows)
    (((1 + weights) * own.losses).mean()).backward()
    assert own.losses.shape == (15,)
    head = batch.share_of_head(weights)
    torch.testing.assert_close(head, twin.lm_head.weight.grad)
    share = batch.whole(model.lm_head.weight, weights) - head
    torch.testing.assert_close(share, twin.wte.weight.grad)
