"""Made-up runs for the pages; the browser's test is only there where there is a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from primum.experiments.inspection.protected import png
from primum.experiments.runs import RunRecord

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
if not any(shutil.which(name) for name in BROWSERS):
    collect_ignore = ["test_browser.py"]

MakeRuns = Callable[..., list[RunRecord]]
WEIGHTS = ["plain", "head", "paper", "network", "permuted", "uniform"]


@pytest.fixture
def make_runs() -> MakeRuns:
    """Runs whose arms differ from base by as many points of accuracy as asked for."""

    def make(gains: dict[str, float], seeds: int = 3, name: str = "a net", **more: Any) -> Any:
        return [_run(name, arm, seed, gain, more) for arm, gain in gains.items()
                for seed in range(seeds)]  # fmt: skip

    return make


@pytest.fixture
def full() -> RunRecord:
    """A run with everything a page can show."""
    import torch

    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    seen = {"id": 0, "label": "cat <1>", "seen": 5, "harmed": 3, "extra_weight": 1.25}
    moments = [_moment(step) for step in (0, 10, 20)]
    run = _run("a net", "base", 0, 0.0, {"moments": moments})
    steps = {
        "gap": [0.01] * 4,
        "extra_weight_p50": [0.0] * 4,
        "extra_weight_p90": [0.2] * 4,
        "extra_weight_max": [0.9] * 4,
    }
    return RunRecord(
        **{
            **vars(run),
            "steps": run.steps | steps,
            "protected": [seen | {"png": png(pixels)}],
            "batch": {"step": 7, "before": [0.1, -0.2], "after": [-0.1, -0.2]},
        }
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
