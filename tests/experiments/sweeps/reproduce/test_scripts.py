"""What the scripts in `benchmarks` measured, against the paper's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce import scripts
from primum.experiments.sweeps.reproduce.findings import Scale
from primum.experiments.sweeps.reproduce.scripts import (
    cifar_folders,
    judge_size,
    judge_solver,
    run_script,
    run_solver,
)
from primum.experiments.sweeps.settings import SettingsError
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
    found = judge_size(row, "full")
    assert found.status == status
    assert ("one is quicker" in found.note) == (status == "not reproduced")


def test_times_are_readable() -> None:
    found = judge_size(size(5030.4, 0.1234), "full")
    assert found.ours == "5,030 -> 0.123 ms; primum with its products 0.1 ms"


def solver(removed: float, iterations: int, limit: float | None = 0.5) -> dict[str, Any]:
    arms = {"paper 50": {"removed": removed, "iterations": iterations}}
    if limit is not None:
        arms["paper 2000"] = {"removed": limit, "iterations": 2000}
    return {"optimizer": "sgd", "batch": 32, "problems": [{"arms": arms}] * 3}


@pytest.mark.parametrize(
    ("group", "statuses"),
    [
        (solver(0.5, 20), ["reproduced", "reproduced"]),
        (solver(0.5, 50, limit=0.52), ["reproduced", "reproduced"]),
        (solver(0.5, 50, limit=0.6), ["reproduced", "not reproduced"]),
        (solver(0.1, 20, limit=0.1), ["not reproduced", "reproduced"]),
        (solver(0.5, 20, limit=None), ["reproduced", "not run"]),
    ],
)
def test_solver_claims(group: dict[str, Any], statuses: list[str]) -> None:
    assert [each.status for each in judge_solver("digits", group, "small")] == statuses


def test_solver_claims_in_words() -> None:
    harm, quick = judge_solver("cifar100", solver(0.5, 20), "small")
    assert harm.claim == "cifar100, sgd, B=32: harm removed"
    assert harm.ours == "50%, mean of 3 problems"
    assert quick.ours == "50% after 50, 50% after 2,000"
    assert quick.note == "stops by a tolerance of 1e-05 on 100%"


def test_solver_takes_the_images_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no cifar10/train-"):
        cifar_folders(tmp_path)
    for name in ("cifar10", "cifar100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-0.parquet").touch()
        assert list(cifar_folders(tmp_path))[-1] == name
    assert cifar_folders(tmp_path / "cifar100") == {"cifar100": tmp_path / "cifar100"}


@pytest.mark.parametrize(("scale", "folder"), [("small", False), ("small", True), ("full", True)])
def test_solver_says_which_images_it_used(
    scale: Scale, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def script(name: str, options: list[str], place: Place, result: str) -> dict[str, Any]:
        asked.append(options)
        return {"groups": [solver(0.5, 20)]}

    monkeypatch.setattr(scripts, "run_script", script)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train-0.parquet").touch()
    told, _ = run_solver(scale, Place(Store(tmp_path), data_dir=str(tmp_path) if folder else None))
    used = "cifar10" if folder else "digits"
    assert told.claim.startswith(used)
    assert asked[0][:2] == ["--dataset", used]
    assert ("--problems" in asked[0]) == (scale == "small")


def test_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "__file__", str(tmp_path / "a/b/c/d/e/f/scripts.py"))
    with pytest.raises(SweepError, match="use a checkout of the repository"):
        run_script("gram.py", [], Place(Store(tmp_path)), "x")


def test_a_script_that_fails(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"benchmarks/gram.py failed with exit code 2"):
        run_script("gram.py", ["--nonsense"], Place(Store(tmp_path)), "x")
