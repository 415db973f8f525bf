"""Cells judged from runs."""

from __future__ import annotations

from dataclasses import replace

from experiments.sweeps.conftest import TINY, record
from primum.experiments.runs import RunRecord
from primum.experiments.sweeps.arms import Arm
from primum.experiments.sweeps.reproduce.accuracy import TABLES, AccuracyTable, Cell
from primum.experiments.sweeps.reproduce.training import judge_table, table_runs

CELL = Cell("a cell", TINY, base=50.0, ours=50.5, time=1.1, radius=0.4)
TABLE = AccuracyTable("a table", 3, (CELL,))


def found(values: dict[str, list[float]]) -> dict[str, RunRecord]:
    return {
        replace(TINY, arm=Arm.parse(arm), seed=seed).key: record(
            arm, seed, value, ms=12.0 if arm != "base" else 10.0
        )
        for arm, accuracies in values.items()
        for seed, value in enumerate(accuracies)
    }


def test_the_papers_recipe_is_judged_and_ours_told_beside() -> None:
    runs = found(
        {
            "base": [0.50, 0.51, 0.49],
            "paper@radius=0.4": [0.55, 0.56, 0.54],
            "primum@radius=0.4": [0.45, 0.46, 0.44],
        }
    )
    paper, primum = judge_table(TABLE, "full", range(3), runs, "cpu")
    assert paper.claim == "a cell"
    assert paper.paper == "50.00 -> 50.50 (+0.50), 1.10x"
    assert paper.ours == "50.00 -> 55.00 (+5.00 ± 2.27), 1.20x"
    assert paper.status == "reproduced"
    assert (primum.status, primum.note) == ("not judged", "lower than base, Holm p 0.004")


def test_the_cells_of_a_recipe_are_one_family() -> None:
    other = replace(CELL, label="another", settings=replace(TINY, epochs=7))
    values = {"base": [0.50, 0.51, 0.49], "paper@radius=0.4": [0.53, 0.54, 0.52]}
    runs = found(values | {"primum@radius=0.4": [0.5, 0.5, 0.5]})
    runs |= {
        replace(other.settings, arm=Arm.parse(arm), seed=seed).key: record(arm, seed, value)
        for arm, accuracies in values.items()
        for seed, value in enumerate(accuracies)
    }
    alone, _ = judge_table(TABLE, "full", range(3), runs, "cpu")
    both = judge_table(replace(TABLE, cells=(CELL, other)), "full", range(3), runs, "cpu")
    assert [each.status for each in both] == ["reproduced", "not judged", "reproduced", "not run"]
    assert alone.adjusted_p is not None
    assert both[0].adjusted_p == both[2].adjusted_p == 2 * alone.adjusted_p
    assert both[1].adjusted_p == judge_table(TABLE, "full", range(3), runs, "cpu")[1].adjusted_p
    assert both[3].adjusted_p is None


def test_a_cell_with_a_missing_run_is_not_run() -> None:
    runs = found({"base": [0.5, 0.5, 0.5], "paper@radius=0.4": [0.5, 0.5]})
    paper, primum = judge_table(TABLE, "full", range(3), runs, "cpu")
    assert paper.status == primum.status == "not run"


def test_the_average_of_the_weights_where_the_paper_reports_it() -> None:
    cell = replace(CELL, figure="ema_test_accuracy", radius=0.2)
    runs = {
        replace(TINY, arm=Arm(arm), seed=seed).key: record(arm, seed, 0.1, ema_test_accuracy=value)
        for arm, values in {"base": (0.3, 0.31), "paper": (0.5, 0.51), "primum": (0.3, 0.3)}.items()
        for seed, value in enumerate(values)
    }
    paper, _ = judge_table(replace(TABLE, cells=(cell,)), "full", range(2), runs, "cpu")
    assert paper.ours.startswith("30.50 -> 50.50")


def test_tables_share_runs() -> None:
    first = {run.key for run in table_runs(TABLES["table1"], "full", range(2), "cpu")}
    fifth = {run.key for run in table_runs(TABLES["ablation-radius"], "full", range(2), "cpu")}
    # Base, and both recipes at radius 0.2, of four settings and two seeds.
    assert len(first & fifth) == 4 * 3 * 2
    assert len(first) == 16 * 3 * 2
