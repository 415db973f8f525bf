"""Tables of the tuned networks, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace

from lab.settings import RunSettings
from lab.tables import group_runs
from lab.tuned_page import rate_table
from laboratory.conftest import record


def test_the_best_rate_is_bold_and_a_diverged_run_is_named() -> None:
    runs = []
    for lr, accuracy in ((0.4, None), (0.1, 0.5), (0.2, 0.6)):
        settings = RunSettings(train_size=20_000, lr=lr)
        made = replace(record("base", 0, 0.5), settings=settings.shared())
        runs.append(replace(made, final=made.final | {"test_accuracy": accuracy}))
    row = rate_table(group_runs(runs)).splitlines()[-1]
    assert row == (
        "| cnn-small, CIFAR-10, SGD, B 128, 20k images, 12 epochs "
        "| 0.1: 50.00, **0.2: 60.00**, 0.4: diverged |"
    )
