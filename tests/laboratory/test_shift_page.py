"""Which settings are measured, and the table and plot, from runs made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.runs import RunRecord, write_table
from lab.settings import RunSettings
from lab.shift_page import ARM, shift_plot, shift_table
from lab.shift_runs import MEASUREMENTS, shift_runs
from lab.studies import STUDIES
from lab.study_results import Results, in_words
from laboratory.conftest import record


def made(run: RunSettings, accuracy: float, **final: float) -> RunRecord:
    plain = record(run.arm.label, run.seed, accuracy)
    return replace(
        plain,
        settings=run.shared(),
        arm_settings=run.arm.settings() | {"key": run.key},
        final=plain.final | final,
    )


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Two seeds of base and radius 0.4 in two settings that were measured, and in one."""
    measured = []
    for run in shift_runs():
        if run.model == "cnn-small" and run.train_size == 5000 and run.data == "cifar10":
            share = 0.1 if run.norm == "batch" else 0.8
            shift = {"common_shift": share, "real_harm": 0.05, "common_harm": 0.04,
                     "real_change": -0.02}  # fmt: skip
            measured.append(made(run, 0.5, **shift))
    write_table(tmp_path / "common-shift.jsonl.gz", measured)
    for name in ("controls-sgd", "batch-norm"):
        runs = [r for r in STUDIES[name].runs() if r.optimizer == "sgd" and r.seed < 2]
        gain = {"base": 0.0, "primum": 0.01 if name == "batch-norm" else 0.05}
        kept = [r for r in runs if r.arm.name == "base" or r.arm.label == "primum"]
        table = [made(r, 0.4 + gain[r.arm.name] + 0.001 * r.seed) for r in kept]
        table = [replace(r, arm="base" if r.arm == "base" else ARM) for r in table]
        write_table(tmp_path / f"{name}.jsonl.gz", table)
    names = ("common-shift", "controls-sgd", "batch-norm")
    index = {"studies": [{"name": name, "page": "results"} for name in names]}
    (tmp_path / "studies.json").write_text(json.dumps(index), encoding="utf-8")
    return Results(tmp_path)


def test_each_setting_once_with_about_as_many_measurements() -> None:
    runs = shift_runs()
    assert len({in_words(run.shared()) for run in runs}) == len(runs)
    assert {run.arm.name for run in runs} == {"base"}
    for run in runs:
        steps = run.epochs * ((run.train_size or 50_000) // run.batch_size)
        assert run.shift_every is not None
        assert MEASUREMENTS - 4 <= steps // run.shift_every <= MEASUREMENTS + 6


def test_table_has_the_largest_share_first_and_settings_with_a_gain_alone(
    results: Results,
) -> None:
    table, line = shift_table(results).split("\n\n")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert line.endswith("of the first and the last column: 1.00 (2 settings).")
    assert [row[:5] for row in rows] == [
        ["cnn-small, CIFAR-10, SGD, B 128, 5k images, 12 epochs", "80", "50", "40", "-20"],
        ["cnn-small, batch norm, CIFAR-10, SGD, B 128, 5k images, 12 epochs", "10", "50", "40",
         "-20"],
    ]  # fmt: skip
    assert rows[0][5].startswith("+5.0 ±")
    assert rows[1][5].startswith("+1.0 ±")


def test_plot_has_a_point_for_each(results: Results) -> None:
    (axes,) = shift_plot(results).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["small CNN, group norm", "small CNN, batch norm"]
    points = [container.lines[0].get_xdata().tolist() for container in axes.containers]
    assert points == [[80.0], [10.0]]
