"""Tiny runs on generated images, records made by hand, and pages' fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.arms import Arm
from lab.job import Place
from lab.looks import png
from lab.runs import RunRecord, without_nan
from lab.settings import RunSettings
from lab.store import Store

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
if not any(shutil.which(name) for name in BROWSERS):
    collect_ignore = ["test_browser.py"]

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
TEXT = RunSettings(
    task="language",
    model="gpt-nano",
    data="python-docs",
    train_size=400,
    test_size=60,
    length=8,
    batch_size=4,
    steps=6,
    evaluate_steps=3,
    optimizer="adamw",
)
TEXT_WORDS = [
    *("--task", "language", "--train-size", "400", "--test-size", "60", "--length", "8"),
    *("--batch-size", "4", "--steps", "6", "--evaluate-steps", "3", "--warmup-steps", "1"),
]
WEIGHTS = ["plain", "head", "paper", "network", "permuted", "uniform"]
MakeRuns = Callable[..., list[RunRecord]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The same sums on every machine."""
    torch.set_num_threads(1)


def tiny(arm: str = "base", seed: int = 0, **changes: Any) -> RunSettings:
    return replace(TINY, arm=Arm.parse(arm), seed=seed, **changes)


def text(arm: str = "base", seed: int = 0, **changes: Any) -> RunSettings:
    return replace(TEXT, arm=Arm.parse(arm, task="language"), seed=seed, **changes)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(
        Store(tmp_path / "out"), command="primum compare", environment={"torch": "some version"}
    )
    made.store.prepare()
    return made


def numbers(record: RunRecord) -> dict[str, Any]:
    """Everything that must be the same whenever a run is repeated; times are not."""
    curves = {name: column for name, column in record.curves.items() if name != "seconds"}
    final = {name: value for name, value in record.final.items() if name != "ms_per_step"}
    rest = {"steps": record.steps, "batch": record.batch, "moments": record.moments}
    return dict(without_nan({"curves": curves, "final": final, **rest}))


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


@pytest.fixture
def make_runs() -> MakeRuns:
    """Runs whose arms differ from base by as many points of accuracy as asked for."""

    def make(gains: dict[str, float], seeds: int = 3, name: str = "a net", **more: Any) -> Any:
        return [_run(name, arm, seed, gain, more) for arm, gain in gains.items()
                for seed in range(seeds)]  # fmt: skip

    return make


def as_language(runs: list[RunRecord]) -> list[RunRecord]:
    """The same runs as those of language models: no accuracy, a lower loss is better."""
    return [
        replace(
            run,
            settings={"task": "language"},
            final={"test_loss": run.final["test_loss"]},
            curves={k: v for k, v in run.curves.items() if k != "test_accuracy"},
        )
        for run in runs
    ]


@pytest.fixture
def full() -> RunRecord:
    """A run with everything a page can show."""
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    seen = {"id": 0, "label": "cat <1>", "seen": 5, "harmed": 3, "extra_weight": 1.25}
    run = _run("a net", "base", 0, 0.0, {"moments": [_moment(step) for step in (0, 10, 20)]})
    steps = {
        "gap": [0.01] * 4,
        "extra_weight_p50": [0.0] * 4,
        "extra_weight_p90": [0.2] * 4,
        "extra_weight_max": [0.9] * 4,
    }
    return replace(
        run,
        steps=run.steps | steps,
        protected=[seen | {"png": png(pixels)}],
        batch={"step": 7, "before": [0.1, -0.2], "after": [-0.1, -0.2]},
    )


def _run(name: str, arm: str, seed: int, gain: float, more: dict[str, Any]) -> RunRecord:
    accuracy, loss = 0.8 + 0.001 * seed + 0.01 * gain, 1.2 + 0.001 * seed - 0.1 * gain
    settings = {
        "settings": {"lr": 0.1, "data": {"name": "made <up>"}},
        "environment": {"torch": "2", "processor": "of a kind"},
        "command": f"primum inspect --seed {seed}",
        "seconds": 2.0,
        # The first epoch is better: it must not count.
        "curves": {"epoch": [1, 2], "train_loss": [2.0, 1.0], "test_loss": [2.1, loss],
                   "test_accuracy": [0.99, accuracy]},
        "steps": {
            "step": [0, 1, 2, 3],
            "applied": [arm == "primum"] * 4,
            "harmed_before": [0.4] * 4,
            "harmed_after": [0.25] * 4,
            "mean_extra_weight": [0.1] * 4,
        },
        "final": {"test_accuracy": accuracy, "test_loss": loss},
    }  # fmt: skip
    return RunRecord(name, arm, seed, **(settings | more))


def _moment(step: int) -> dict[str, Any]:
    figures = {
        "reor": [0, 0.3, 0.2, 0.5, -0.1, 0.0],
        "reor_real": [0, 0.28, 0.2, None, -0.1, 0.0],
        "harmed": [0.4] * 6,
        "harmed_real": [0.45] * 6,
        "sign_right": [0.9] * 6,
        "mean_extra_weight": [0.0, *[0.1] * 5],
    }
    changes = {name: [0.2, -0.1, 0.05] for name in ("plain", "head", "network")}
    return {
        "step": step,
        "label": f"step {step}",
        "lr": 0.1,
        "loss": 2.0,
        "layers": ["body", "head"],
        "scale": [1.0, 2.0],
        "error": [0.0, 0.4],
        "table": {"weights": WEIGHTS, **figures},
        "changes": changes,
        "real_changes": changes,
        "by_lr": {"factor": [0.5, 1.0], "harmed_real": [0.4, 0.4], "sign_right": [0.95, 0.9],
                  "correlation": [1.0, 1.0]},
    }  # fmt: skip
