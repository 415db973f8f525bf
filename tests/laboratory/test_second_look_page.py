"""The table of the study, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.runs import read_table
from lab.second_look_page import second_look_table
from lab.tables import group_runs
from laboratory.conftest import record

ROOT = Path(__file__).resolve().parents[2]


def test_one_row_per_arm_with_both_differences() -> None:
    means = {"base": 0.4, "primum@radius=0.4": 0.5, "primum@radius=0.4,second_look=head": 0.48}
    runs = []
    for arm, accuracy in means.items():
        for seed in range(3):
            made = record(arm, seed, accuracy + 0.01 * seed)
            curves = made.curves | {"train_loss": [2.0, 1.0 + 0.1 * seed]}
            runs.append(replace(made, curves=curves))
    rows = second_look_table(group_runs(runs)[0]).splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == ["plain training", "primum", "second look, head"]
    assert [row[2] for row in cells] == ["41.0 ± 2.5", "51.0 ± 2.5", "49.0 ± 2.5"]
    assert cells[0][3:5] == ["–", "–"]
    assert cells[2][3].startswith("+8.0 ± ")
    assert cells[2][4].startswith("+2.0 ± ")
    assert {row[6] for row in cells} == {"1.10"}


def test_the_guides_sentence_has_the_figures_of_the_runs() -> None:
    group = group_runs(read_table(ROOT / "results" / "second-look.jsonl.gz"))[0]
    gains = group.against_base("accuracy")
    arms = ("damped@damping=0.5", "damped", "primum@radius=0.4")
    half, most, own = (f"{gains[arm].interval.mean:.1f}" for arm in arms)
    guide = " ".join((ROOT / "docs" / "guide.md").read_text(encoding="utf-8").split())
    assert f"They gain {half} and {most} points; primum gains {own}, and four seeds" in guide
    assert not any(test.seen for test in group.focus_against("accuracy").values())
