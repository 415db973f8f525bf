"""`benchmarks/gain_rank.py` runs and measures what it says."""

import json
from pathlib import Path

import pytest
import torch

from primum.gram import MatrixFree

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gain_rank(load):
    return load("gain_rank")


def test_errors_are_relative_and_vanish_at_full_rank(gain_rank, rng):
    features = torch.randn(6, 5, generator=rng)
    features[:, -1] = 1
    gradients, gain = torch.randn(6, 3, generator=rng), torch.rand(3, 5, generator=rng) + 0.1
    found = gain_rank.errors(MatrixFree(features, gradients, gain, has_bias=True))
    rows = (gradients.unsqueeze(2) * features.unsqueeze(1)).flatten(1).double()
    u, s, vh = torch.linalg.svd(gain[:, :-1].double(), full_matrices=False)
    rough = gain.double().clone()
    rough[:, :-1] = s[0] * torch.outer(u[:, 0], vh[0])
    exact, approximate = ((rows * each.flatten()) @ rows.t() for each in (gain.double(), rough))
    expected = ((approximate - exact).norm() / exact.norm()).item()
    assert found["Q1 r=1"] == pytest.approx(expected)
    assert found["Q1 r=1"] > found["Q1 r=3"]
    assert max(found["Q1 r=3"], found["Q2 r=3"]) < 1e-12


def test_it_runs_on_digits(gain_rank, tmp_path, capsys):
    out = tmp_path / "gain_rank.json"
    assert gain_rank.main(["--steps", "2", "--batch", "16", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [(row["model"], row["step"]) for row in content["results"]] == [
        ("cnn", 1),
        ("cnn", 2),
        ("transformer", 1),
        ("transformer", 2),
    ]
    assert all(0 < row["Q1 r=5"] < 1 for row in content["results"])
    assert "64x10" in capsys.readouterr().out


def test_the_page_has_the_measured_table(gain_rank):
    rows = []
    for path in sorted((BENCHMARKS / "results").glob("gain_rank*.json"), reverse=True):
        content = json.loads(path.read_text(encoding="utf-8"))
        command = content["environment"]["command"]
        assert command.startswith("python benchmarks/gain_rank.py --data-dir ")
        assert command.count("/") == 1, "names a folder of a machine"
        rows += content["results"]
    page = (BENCHMARKS.parent / "docs" / "paper.md").read_text(encoding="utf-8")
    assert gain_rank.page_table(rows) in page
