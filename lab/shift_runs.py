"""The runs behind "When does it pay?": plain training in which the common shift is measured."""

from __future__ import annotations

from dataclasses import replace

from lab.settings import RunSettings
from lab.speedrun import DESIGNS, tuned
from lab.tuned import HALF_RATE, SETTINGS
from lab.tutorial_runs import tiny

MEASUREMENTS = 24  # in a run, about


def shift_runs(*, smoke: bool = False) -> list[RunSettings]:
    """One run of base for each of the settings in which radius 0.4 was compared with base."""
    short = RunSettings(train_size=5000, test_size=5000, evaluate_every=2)
    large = RunSettings(train_size=10_000, test_size=5000, evaluate_every=4)
    settings = [
        *(replace(tuned(budget), views=DESIGNS["full"].views) for budget in (2, 4, 8)),
        *(setting.run for setting in SETTINGS),
        HALF_RATE,
        short,
        replace(short, optimizer="adamw"),
        replace(short, norm="batch"),
        replace(short, norm="batch", optimizer="adamw"),
        replace(short, data="cifar100"),
        replace(short, data="cifar100", optimizer="adamw"),
        replace(short, model="vit-micro", optimizer="adamw"),
        replace(short, model="resnet20", lr=0.05, epochs=8),
        replace(large, batch_size=512),
        replace(large, batch_size=1024),
    ]
    if smoke:
        return [replace(tiny(run), shift_every=2) for run in settings[-4:]]
    return [replace(run, shift_every=_every(run)) for run in settings]


def _every(run: RunSettings) -> int:
    steps = run.epochs * (run.train_size or 50_000) // run.batch_size
    return max(1, steps // MEASUREMENTS)
