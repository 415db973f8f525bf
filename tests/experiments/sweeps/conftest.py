"""Tiny runs on generated images, and records made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primum.experiments.runs import RunRecord, without_nan
from primum.experiments.sweeps.arms import Arm
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.store import Store

TINY = RunSettings(
    model="cnn-small",
    data="generated",
    image_size=8,
    classes=4,
    train_size=32,
    test_size=12,
    batch_size=8,
    epochs=2,
    augment="none",
)
# The same on the command line.
TINY_WORDS = [
    *("--data", "generated", "--image-size", "8", "--classes", "4", "--train-size", "32"),
    *("--test-size", "12", "--batch-size", "8", "--epochs", "2", "--augment", "none"),
]


def tiny(arm: str = "base", seed: int = 0, **changes: Any) -> RunSettings:
    return replace(TINY, arm=Arm.parse(arm), seed=seed, **changes)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(
        Store(tmp_path / "out"), command="primum compare", environment={"torch": "some version"}
    )
    made.store.prepare()
    return made


def numbers(record: RunRecord) -> dict[str, Any]:
    """All that must be the same whenever a run is made; times are not."""
    curves = {name: column for name, column in record.curves.items() if name != "seconds"}
    final = {name: value for name, value in record.final.items() if name != "ms_per_step"}
    return dict(without_nan({"curves": curves, "steps": record.steps, "final": final}))


def record(
    arm: str,
    seed: int,
    accuracy: float,
    *,
    losses: tuple[float, ...] = (2.0, 1.0),
    ms: float = 10.0,
    extra: tuple[float | None, ...] = (0.1, 0.3),
    **final: float,
) -> RunRecord:
    """A run of two epochs of five steps."""
    applied = arm.split("@")[0] not in ("base", "lr-matched", "time-matched", "focal")
    return RunRecord(
        name="a model",
        arm=arm,
        seed=seed,
        settings={"lr": 0.1},
        curves={
            "epoch": [1.0, 2.0],
            "step": [5, 10],
            "test_loss": list(losses),
            "test_accuracy": [0.1, accuracy],
            "seconds": [5 * ms / 1e3, 10 * ms / 1e3],
        },
        steps={
            "step": [5, 10],
            "harmed_before": [0.5, 0.3],
            "harmed_after": [0.4, 0.2],
            "mean_extra_weight": list(extra),
            "applied": [applied, applied],
        },
        final={"test_accuracy": accuracy, "test_loss": losses[-1], "ms_per_step": ms, **final},
        seconds=ms / 100,
    )
