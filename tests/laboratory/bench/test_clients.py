"""The study of other people's scripts runs, and its page says what its results say."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from lab.bench import clients

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "lab" / "bench" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"


def test_every_script_runs(tmp_path: Path, capsys) -> None:
    out = tmp_path / "clients.json"
    before = PAGE.read_text()
    assert clients.main(["--quick", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [row["script"] for row in content["rows"]] == [
        script.name for script in clients.SCRIPTS for _ in script.arms
    ]
    for row in content["rows"]:
        assert len(row["plain"]) == len(row["with"]) == 1
        assert all(math.isfinite(value) for value in row["plain"] + row["with"])
        assert row["fallbacks"] == 0, row
        assert row["with_ms"] > 0
        if "paused" in row["added"]:
            assert row["extra"]["other_network_off_by"] == 0
            assert row["discarded"] == 0
    assert "seeds better" in capsys.readouterr().out
    assert PAGE.read_text() == before  # a quick run leaves the page alone


def test_results_are_of_all_scripts_and_three_seeds_or_more() -> None:
    content = json.loads(RESULTS.read_text())
    found = [(row["script"], row["added"]) for row in content["rows"]]
    assert found == [(script.name, arm) for script in clients.SCRIPTS for arm in script.arms]
    for row in content["rows"]:
        assert len(row["plain"]) == len(row["with"]) >= 3
        figures = [*row["plain"], *row["with"], *row["extra"].values()]
        assert all(math.isfinite(value) for value in figures), row["script"]
    assert {"torch", "cpu", "command", "seconds", "primum"} <= content["environment"].keys()


@pytest.mark.parametrize(
    ("more_is_better", "with_it", "wins", "change"),
    [(False, [1.0, 3.0], 1, "+0.0 ± 70.7"), (True, [3.0, 3.0], 2, "+50.0 ± 0.0")],
)
def test_better_is_better(
    more_is_better: bool, with_it: list[float], wins: int, change: str
) -> None:
    page = sys.modules["_clients_page"]
    row = {"plain": [2.0, 2.0], "with": with_it, "more_is_better": more_is_better}
    assert page.wins(row) == wins
    assert page.change_cell(row) == change


def test_without_the_line_nothing_is_attached() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    run = clients.Run(0, None)
    assert run.attach(model, optimizer) is None
    assert not model[1]._forward_hooks
    for _ in range(3):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    assert len(run.steps) == 2  # from one step to the next


def test_unknown_script() -> None:
    with pytest.raises(SystemExit, match="no script has 'nothing' in its name; there are: ResNet"):
        clients.main(["--only", "nothing"])


def test_scripts_run_again_replace_their_own_rows() -> None:
    def content(scripts: list[str], figure: float) -> dict:
        rows = [{"script": script, "plain": [figure]} for script in scripts]
        return {"rows": rows, "environment": {"date": figure}, "again": []}

    old, new = content(["a", "b", "b", "c"], 1.0), content(["b", "b", "d"], 2.0)
    found = clients.merged(old, new)
    assert [(row["script"], row["plain"]) for row in found["rows"]] == [
        ("a", [1.0]), ("b", [2.0]), ("b", [2.0]), ("c", [1.0]), ("d", [2.0]),
    ]  # fmt: skip
    assert found["environment"] == {"date": 1.0}
    assert found["again"] == [{"scripts": ["b", "d"], "environment": {"date": 2.0}}]
