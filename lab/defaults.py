"""Default learning rates, weight decays and other settings, by task."""

from __future__ import annotations

from typing import Any

from lab.arms import Task
from lab.schedules import scaled_lr

OPTIMIZERS: dict[str, str] = {"sgd": "SGD", "adamw": "AdamW"}
# The paper's for CIFAR (App. E), at batches of 128, scaled by the square root of the batch size.
RATES: dict[str, float] = {"sgd": 0.1, "adamw": 1e-3}
DECAYS: dict[str, float] = {"sgd": 1e-4, "adamw": 5e-5}
# For language, at batches of 32 sequences, likewise.
LANGUAGE_RATES: dict[str, float] = {"sgd": 1.0, "adamw": 8e-3}
LANGUAGE_DECAYS: dict[str, float] = {"sgd": 0.0, "adamw": 0.01}
SEQUENCES = 32
# What the command line takes for --task language.
LANGUAGE: dict[str, Any] = {
    "model": "gpt-nano",
    "data": "python-docs",
    "batch_size": SEQUENCES,
    "steps": 400,
    "evaluate_steps": 50,
    "warmup_steps": 40,
    "optimizer": "adamw",
    "beta2": 0.99,
    "clip": 1.0,
}
# Settings added after the first stored runs, left out of a run's key at these values.
LATER: dict[str, Any] = {
    "evaluate_every": 1,
    "observe_every": 10,
    "shift_every": None,
    "order": "epoch",
    "look": None,
    "bias_lr": 1.0,
    "views": 1,
    "task": "images",
    "evaluate_steps": None,
    "warmup_steps": None,
}


def usual_lr(task: Task, optimizer: str, batch_size: int) -> float:
    """The default learning rate for a batch size."""
    if task == "language":
        return scaled_lr(LANGUAGE_RATES[optimizer], batch_size, base_batch_size=SEQUENCES)
    return scaled_lr(RATES[optimizer], batch_size)


def usual_decay(task: Task, optimizer: str) -> float:
    """The default weight decay."""
    return (LANGUAGE_DECAYS if task == "language" else DECAYS)[optimizer]
