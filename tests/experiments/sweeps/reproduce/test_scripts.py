"""What the scripts in `benchmarks` measured, against the paper's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce import scripts
from primum.experiments.sweeps.reproduce.scripts import judge_size, judge_solver, run_script
from primum.experiments.sweeps.store import Store
from primum.experiments.sweeps.sweep import SweepError


def size(explicit: float | None, factorised: float, paper: Any = (2.0, 8.0)) -> dict[str, Any]:
    ms = {"factorised": factorised, "primum": 0.1}
    return {
        "optimizer": "sgd",
        "inputs": 64,
        "outputs": 10,
        "batch": 128,
        "paper_explicit": paper,
        "paper_factorised": (1.0, 8.0),
        "ms": ms if explicit is None else {**ms, "explicit": explicit},
    }


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (size(5.0, 1.0), "reproduced"),
        (size(0.5, 1.0), "not reproduced"),
        (size(0.5, 1.0, paper=(0.5, 8.0)), "reproduced"),
        (size(None, 1.0), "not run"),
        (size(5.0, 1.0, paper=None), "not run"),
    ],
)
def test_quicker_where_the_papers_is(row: dict[str, Any], status: str) -> None:
    assert judge_size(row, "full").status == status


def solver(removed: float, iterations: int) -> dict[str, Any]:
    arm = {"removed": removed, "iterations": iterations}
    return {"optimizer": "sgd", "batch": 32, "problems": [{"arms": {"paper 50": arm}}] * 3}


def test_solver_claims() -> None:
    assert judge_solver(solver(0.5, 20), "small").status == "reproduced"
    assert judge_solver(solver(0.5, 50), "small").status == "not reproduced"
    assert judge_solver(solver(0.1, 20), "small").status == "not reproduced"
    assert judge_solver(solver(0.5, 20), "small").ours == "50%; on 100% of 3 problems"


def test_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "__file__", str(tmp_path / "a/b/c/d/e/f/scripts.py"))
    with pytest.raises(SweepError, match="use a checkout of the repository"):
        run_script("gram.py", [], Place(Store(tmp_path)), "x")


def test_a_script_that_fails(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"benchmarks/gram.py failed with exit code 2"):
        run_script("gram.py", ["--nonsense"], Place(Store(tmp_path)), "x")
