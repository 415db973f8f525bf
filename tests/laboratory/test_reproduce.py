"""`reproduce` from end to end at the smallest scale, and judged from made-up runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import reproduce
from lab.claims import TABLES, Cell, Table
from lab.cli import PAPER, main
from lab.errors import UserError
from lab.evidence import (
    findings_of,
    judge_blocks,
    judge_moments,
    judge_size,
    judge_solver,
    judge_table,
    runs_of,
)
from lab.job import Place
from lab.reproduce import EXPERIMENTS, cifar_folders, run_scripts
from lab.runs import RunRecord, read_runs
from lab.store import Store
from laboratory.conftest import TINY, _moment, record

CELL = Cell("a cell", TINY, base=50.0, ours=50.5, time=1.1, radius=0.4)


def test_table_1_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "--scale", "smoke", "--out", str(tmp_path)]
    assert main([*words, "table1"]) == 0
    printed = capsys.readouterr().out
    assert "91.71 -> 91.93 (+0.22), 1.13x" in printed
    assert "not judged" in printed
    content = json.loads((tmp_path / "smoke" / "table1.json").read_text())
    assert len(content["findings"]) == 32
    assert [len(arms) for arms in content["runs"].values()] == [3] * 16  # what they rest on
    stored = {run.arm_settings["key"] for run in read_runs([tmp_path])}
    keys = {key for arms in content["runs"].values() for own in arms.values() for key in own}
    assert keys == stored
    assert str(tmp_path) not in (tmp_path / "smoke" / "table1.md").read_text()
    # The ablation shares runs; and with --no-resume a folder in use is refused.
    assert main([*words, "ablation-radius"]) == 0
    assert "run(s) already finished" in capsys.readouterr().err
    assert main([*words, "table1", "--no-resume"]) == 2
    assert "already has runs" in capsys.readouterr().err


def test_figure_1_smoke_is_ordinary_runs(tmp_path: Path) -> None:
    name, count = "figure1", 6
    words = ["reproduce", name, "--scale", "smoke", "--out", str(tmp_path)]
    assert main(words) == 0
    content = json.loads((tmp_path / "smoke" / f"{name}.json").read_text())
    assert [finding["status"] for finding in content["findings"]] == ["not judged"] * count
    runs = list((tmp_path / "smoke" / "runs").iterdir())
    assert len(runs) == len(runs_of(name, "smoke", range(1)))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in PAPER)
    assert set(PAPER) == set(EXPERIMENTS)
    assert "full 240 runs, 5 seed(s); small 144 runs, 3 seed(s)" in printed  # 16 cells, 3 arms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table1", "--seeds", "1", "--data-dir", "nowhere"], "nowhere"),
        (["figure1", "--workers", "999"], "999 workers were requested"),
        (["figure1", "--seeds", "7"], "leave out --seeds and --workers"),
        (["gram", "--device", "cuda"], "leave out --device cuda"),
    ],
)
def test_user_errors(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.json"))


def found(
    values: dict[str, list[float]], cell: Cell = CELL, **final: float
) -> dict[str, dict[str, list[RunRecord]]]:
    runs = {
        arm: [
            record(arm, seed, value, ms=12.0 if arm != "base" else 10.0, **final)
            for seed, value in enumerate(accuracies)
        ]
        for arm, accuracies in values.items()
    }
    return {cell.label: runs}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> str:
    other = replace(CELL, label="another", settings=replace(TINY, epochs=7))
    monkeypatch.setitem(TABLES, "made up", Table("a table", 3, (CELL, other)))
    return "made up"


def test_the_papers_recipe_is_judged_and_primum_stands_beside(table: str) -> None:
    values = {
        "base": [0.50, 0.51, 0.49],
        "paper": [0.55, 0.56, 0.54],
        "primum": [0.45, 0.46, 0.44],
    }
    paper, primum, *rest = judge_table(table, "full", found(values))
    assert (paper.claim, paper.paper) == ("a cell", "50.00 -> 50.50 (+0.50), 1.10x")
    assert paper.ours == "50.00 -> 55.00 (+5.00 ± 2.27), 1.20x"
    assert paper.status == "reproduced"
    assert (primum.status, primum.note) == ("not judged", "lower than base, Holm p 0.004")
    assert [each.status for each in rest] == ["not run", "not run"]
    other = TABLES[table].cells[1]
    both = judge_table(table, "full", found(values) | found(values, other))
    assert paper.adjusted_p is not None
    assert both[0].adjusted_p == both[2].adjusted_p == 2 * paper.adjusted_p  # one family


def test_averaged_weights_where_the_paper_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(CELL, metric="ema_accuracy")
    monkeypatch.setitem(TABLES, "made up", Table("a table", 3, (cell,)))
    runs = found({arm: [0.1, 0.1] for arm in ("base", "paper", "primum")},
                 ema_test_accuracy=0.3)  # fmt: skip
    assert judge_table("made up", "full", runs)[0].ours.startswith("30.00 -> 30.00")


def test_tables_share_runs() -> None:
    first, fifth = (
        {run.key for run in runs_of(name, "full", range(2))}
        for name in ("table1", "ablation-radius")
    )
    # Base, and both recipes at radius 0.2, of four settings and two seeds.
    assert len(first & fifth) == 4 * 3 * 2
    assert len(first) == 16 * 3 * 2


def test_figure_1_from_measurements() -> None:
    moments = [_moment(20) | {"error": [0.0, 0.3, 0.5]}] * 3
    found = judge_moments("a net", moments, "small")
    assert [each.status for each in found] == ["reproduced"] * 3
    assert found[0].claim == "a net: error of the last layer's matrix"
    assert [each.ours for each in found] == ["0.50", "0.50 (last), 0.30 (half of them)",
                                             "100%, mean +0.20"]  # fmt: skip
    flat = [_moment(20) | {"error": [0.0, 0.6, 0.6]}]
    assert [each.status for each in judge_moments("n", flat, "small")][:2] == ["not reproduced"] * 2


def test_figure_11_is_judged_by_the_ends() -> None:
    runs = [
        replace(record("explicit", 0, accuracy, ms=ms, peak_bytes=size), arm_settings={"blocks": n})
        for n, accuracy, ms, size in ((0, 0.5, 10, 100), (1, 0.5, 10, 100), (4, 0.51, 30, 120))
    ]
    found = judge_blocks(runs, "small")
    assert [each.status for each in found] == ["reproduced", "not reproduced", "reproduced"]
    assert findings_of("multilayer", "small", {}) == []


def size(explicit: float | None, factorised: float, paper: Any = (2.0, 8.0)) -> dict[str, Any]:
    ms = {"factorised": factorised, "primum": 0.1}
    row = {"optimizer": "sgd", "inputs": 64, "outputs": 10, "batch": 128}
    row |= {"paper_explicit": paper, "paper_factorised": (1.0, 8.0)}
    return row | {"ms": ms if explicit is None else {**ms, "explicit": explicit}}


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
def test_faster_where_the_papers_is(row: dict[str, Any], status: str) -> None:
    found = judge_size(row, "full")
    assert found.status == status
    assert ("one is faster" in found.note) == (status == "not reproduced")


def solver(removed: float, iterations: int, limit: float | None = 0.5) -> dict[str, Any]:
    arms = {"paper 50": {"removed": removed, "iterations": iterations}}
    if limit is not None:
        arms["paper 2000"] = {"removed": limit, "iterations": 2000}
    return {"optimizer": "sgd", "batch": 32, "problems": [{"arms": arms}] * 3}


@pytest.mark.parametrize(
    ("group", "statuses"),
    [
        (solver(0.5, 50, limit=0.52), ["reproduced", "reproduced"]),
        (solver(0.5, 50, limit=0.6), ["reproduced", "not reproduced"]),
        (solver(0.1, 20, limit=0.1), ["not reproduced", "reproduced"]),
        (solver(0.5, 20, limit=None), ["reproduced", "not run"]),
    ],
)
def test_solver_claims(group: dict[str, Any], statuses: list[str]) -> None:
    harm, early = judge_solver("cifar100", group, "small")
    assert [harm.status, early.status] == statuses
    assert harm.claim == "cifar100, sgd, B=32: harm removed"


def test_solver_uses_the_images_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no cifar10/train-"):
        cifar_folders(tmp_path)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train-0.parquet").touch()
    asked: list[list[str]] = []

    def script(name: str, options: list[str], place: Place, result: str) -> dict[str, Any]:
        asked.append(options)
        return {"groups": [solver(0.5, 20)]}

    monkeypatch.setattr(reproduce, "_run_script", script)
    for folder, used in ((None, "digits"), (str(tmp_path), "cifar10")):
        found = run_scripts("figure2", "small", Place(Store(tmp_path), data_dir=folder))
        assert list(found) == [used]
        assert asked[-1][:2] == ["--dataset", used]
    assert findings_of("figure2", "small", {}, found)[0].claim.startswith("cifar10")


def test_a_script_that_fails(tmp_path: Path) -> None:
    place = Place(Store(tmp_path))
    with pytest.raises(UserError, match=r"lab.bench.gram failed with exit code 2"):
        reproduce._run_script("gram", ["--nonsense"], place, "x")
