"""The runs behind docs/tutorial.md: effect of a step on its samples, measured in training."""

from __future__ import annotations

from dataclasses import replace

from lab.arms import Arm
from lab.settings import LookSettings, RunSettings


def tutorial_runs() -> list[RunSettings]:
    """Runs of plain training with whole-network measurements, and with two kinds of weights."""
    measured = {32: 4, 128: 2, 512: 1}  # batches per measurement
    factors = (1 / 16, 1 / 4, 1.0, 4.0)

    def run(
        arm: str, model: str, optimizer: str, batch: int, seed: int, epochs: int = 5
    ) -> RunSettings:
        every = 10_000 // batch
        look = LookSettings(every, measured.get(batch, 1), radius=0.2, lr_factors=factors)
        settings = RunSettings(
            model=model,
            train_size=10_000,
            test_size=5_000,
            optimizer=optimizer,  # type: ignore[arg-type]
            schedule="constant",
            batch_size=batch,
            seed=seed,
        )
        if arm != "base":
            return replace(settings, epochs=epochs, arm=Arm(arm, radius=0.2))
        return replace(settings, steps=epochs * every, observe_every=1, look=look, arm=Arm("base"))

    runs = []
    for seed in range(3):
        for optimizer in ("sgd", "adamw"):
            batches = (128, 512, 32) if seed < 2 else (128,)
            runs += [run("base", "cnn-small", optimizer, batch, seed) for batch in batches]
    runs.append(run("base", "vit-micro", "adamw", 128, 0))
    for seed in range(3):
        for optimizer in ("sgd", "adamw"):
            runs.append(run("primum", "cnn-small", optimizer, 128, seed))
    runs.append(run("base", "resnet20", "sgd", 128, 0, epochs=2))
    return runs


def tiny(run: RunSettings) -> RunSettings:
    """The run on a few generated images."""
    look = None if run.look is None else replace(run.look, every=2, batches=1)
    return replace(run, data="generated", image_size=8, train_size=32, test_size=16, batch_size=8,
                   epochs=1, steps=None if look is None else 2, look=look)  # fmt: skip
