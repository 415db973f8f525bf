"""Table of the study `second-look`, for docs/guide.md."""

from __future__ import annotations

from statistics import fmean

from lab.formatting import show, with_p
from lab.tables import Group
from lab.text_tables import markdown_table

NAMES = {
    "base": "plain training",
    "primum@radius=0.4": "primum",
    "primum@radius=0.4,second_look=head": "second look, head",
    "primum@radius=0.4,second_look=network": "second look, network",
    "damped@damping=0.5": "plain, common shift damped by 1/2",
    "damped": "plain, common shift damped by 3/4",
}


def second_look_table(group: Group) -> str:
    """One row per arm: accuracy against base and against primum, test and training loss."""
    tests, others = group.against_base("accuracy"), group.focus_against("accuracy")
    rows = [
        [NAMES.get(arm, arm), str(len(runs)), show(group.interval(arm, "accuracy"), 1),
         with_p(tests.get(arm)), with_p(others.get(arm)),
         show(group.interval(arm, "loss"), 3),
         f"{fmean(run.curves['train_loss'][-1] for run in runs):.2f}"]
        for arm, runs in group.arms.items()
    ]  # fmt: skip
    head = ["arm", "seeds", "accuracy, %", "- plain (Holm p)", "primum - arm (Holm p)",
            "test loss", "train loss"]  # fmt: skip
    return markdown_table(head, rows)
