"""The table and the plot of the ablation, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.parts_page import harm_by_epoch, parts_plot, parts_table
from lab.runs import RunRecord
from lab.tables import Group, group_runs
from laboratory.conftest import record


def run(arm: str, seed: int, accuracy: float, harm: list[float]) -> RunRecord:
    made = record(arm, seed, accuracy + 0.01 * seed)
    return replace(made, steps=made.steps | {"harm_before": [h + 0.1 * seed for h in harm]})


@pytest.fixture
def group() -> Group:
    runs = [run("base", seed, 0.4, [0.3, 0.3]) for seed in range(3)]
    runs += [run("primum@part=backbone", seed, 0.2, [0.4, 1.2]) for seed in range(3)]
    return group_runs(runs)[0]


def test_harm_is_averaged_over_seeds(group: Group) -> None:
    assert harm_by_epoch(group.arms["base"]) == pytest.approx([0.4, 0.4])


def test_table_and_plot(group: Group) -> None:
    rows = parts_table(group, {"primum@part=backbone": "backbone alone"}).splitlines()[2:]
    assert rows[0] == "| base | 3 | 41.0 ± 2.5 | – | 0.40 | 0.40 | – |"
    name, seeds, accuracy, change, first, last, _ = rows[1].strip("| ").split(" | ")
    assert (name, seeds, accuracy) == ("backbone alone", "3", "21.0 ± 2.5")
    assert change.startswith("-20.0 ± 2.3")
    assert (first, last) == ("0.50", "0.90")
    left, right = parts_plot(group, {}).axes
    assert [len(axes.lines) for axes in (left, right)] == [2, 2]
    assert list(right.lines[1].get_ydata()) == pytest.approx([0.5, 1.3])
