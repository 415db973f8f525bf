"""The speedrun on CIFAR-10: a recipe tuned for plain training, at several budgets, and its runs.

Every budget is a complete schedule, rescaled to its epochs. The recipe follows airbench (Jordan,
2024). Learning rate and weight decay are decoupled: both are given per 1,024 samples, including the
factor from momentum, so that batch size, momentum and learning rate can be changed without changing
the decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lab.arms import Arm
from lab.plan import plan
from lab.scales import Scale
from lab.settings import Precision, RunSettings
from lab.torchrun import computes_bf16

BATCH, MOMENTUM = 512, 0.85
TUNING_SEED = 100  # not among the seeds that are compared
RATES = {
    2: (5.75, 11.5, 23.0, 46.0),
    3: (5.75, 11.5, 23.0),
    4: (5.75, 11.5, 23.0, 46.0),
    6: (5.75, 11.5, 23.0),
    8: (5.75, 11.5, 23.0),
    12: (5.75, 11.5, 23.0),
    16: (2.875, 5.75, 11.5),
}
DECAYS = (0.0075, 0.015, 0.03)
# For every budget: the best of `tuning_runs` on all images at 2, 3, 4 and 16 epochs, and within 0.1
# points of it at 8 and 12. At 6, one seed ended 0.5 points higher at twice the rate.
LR, WEIGHT_DECAY = 11.5, 0.015
MAIN = ("base", "primum@radius=0.1", "primum@radius=0.2", "primum@radius=0.4")
SMALLEST = ("primum@radius=0.05",)
CONTROLS = ("paper", "lr-matched@radius=0.2", "permuted@radius=0.2")
# Seeds on the results page, by arms and epochs.
SEEDS = {
    MAIN: {2: 5, 3: 3, 4: 5, 6: 3, 8: 5, 12: 3, 16: 3},
    SMALLEST: {2: 3, 3: 3, 4: 3, 6: 3, 8: 3, 12: 3},
    CONTROLS: {4: 3, 8: 3},
}
NOTES = {
    "full": "All 50,000 training images.",
    "small": "20,000 training images.",
    "smoke": "A few steps on generated images: it shows that everything runs, and nothing else.",
}


@dataclass(frozen=True)
class Design:
    """Training images (None is all), epochs of each budget, seeds, views per test image."""

    train_size: int | None
    budgets: tuple[int, ...]
    seeds: int
    views: int


DESIGNS: dict[Scale, Design] = {
    "full": Design(None, (2, 3, 4, 6, 8, 12, 16), 5, 6),
    "small": Design(20_000, (2, 4, 8), 3, 2),
    "smoke": Design(64, (1, 2), 1, 2),
}


def recipe(epochs: int, *, lr: float, weight_decay: float, batch_size: int = BATCH) -> RunSettings:
    """Settings of a complete schedule.

    Args:
        epochs: Length; the schedule is a triangle with its peak at 23%.
        lr: Total step per gradient at a batch of 1,024, including momentum.
        weight_decay: Total decay of the weights in the same units.
        batch_size: Samples per step.
    """
    lasting = 1 + 1 / (1 - MOMENTUM)  # total factor of one gradient under Nesterov momentum
    return RunSettings(
        model="cnn-whitened",
        augment="translate-alternate",
        batch_size=batch_size,
        epochs=epochs,
        lr=lr * batch_size / (1024 * lasting),
        weight_decay=weight_decay / lr,
        bias_lr=64.0,
        momentum=MOMENTUM,
        nesterov=True,
        schedule="linear",
        warmup=round(0.23 * epochs, 2),
        lr_floor=0.07,
        label_smoothing=0.2,
        precision="bf16",
    )


def tuned(epochs: int) -> RunSettings:
    """The recipe with the tuned settings for a budget."""
    return recipe(epochs, lr=LR, weight_decay=WEIGHT_DECAY)


def best_precision(device: str) -> Precision:
    """bf16 if the device computes in it (about twice as fast as fp32), else fp32."""
    return "bf16" if computes_bf16(device) else "fp32"


def tuning_runs(scale: Scale = "full", train_size: int | None = None) -> list[RunSettings]:
    """Runs of plain training: learning rates at every budget, weight decays at the middle one."""
    runs = [
        recipe(budget, lr=lr, weight_decay=DECAYS[1])
        for budget, rates in RATES.items()
        for lr in rates
    ]
    runs += [recipe(4, lr=lr, weight_decay=decay) for lr in RATES[4][1:3] for decay in DECAYS]
    runs = [replace(run, seed=TUNING_SEED, evaluate_every=run.epochs) for run in runs]
    runs = [_at(run, scale, train_size) for run in runs]
    return list({run.key: run for run in runs}.values())


def speedrun_runs(
    scale: Scale = "small",
    seeds: Iterable[int] | None = None,
    *,
    budgets: Sequence[int] = (),
    train_size: int | None = None,
    device: str = "cpu",
    precision: Precision = "bf16",
) -> list[RunSettings]:
    """All runs of a scale, in an order that allows a fair comparison wherever it is stopped.

    First base and three radii, seed by seed, with the longest budget last; then the other arms in
    the same order.
    """
    design = DESIGNS[scale]
    chosen = sorted(budgets or design.budgets)
    numbers = list(range(design.seeds) if seeds is None else seeds)
    runs: list[RunSettings] = []
    for arms in (MAIN, (*MAIN, *SMALLEST, *CONTROLS)):
        for part in (chosen[:-1], chosen[-1:]):
            points = [
                replace(tuned(budget), views=design.views, device=device, precision=precision)
                for budget in part
            ]
            points = [_at(point, scale, train_size) for point in points]
            runs += plan(points, [Arm.parse(arm) for arm in arms], numbers) if points else []
    return list({run.key: run for run in runs}.values())


def study_runs() -> list[RunSettings]:
    """The runs of scale full that the results page shows, by `SEEDS`."""
    seeds = {
        (Arm.parse(arm), epochs): count
        for arms, counts in SEEDS.items()
        for arm in arms
        for epochs, count in counts.items()
    }
    return [run for run in speedrun_runs("full") if run.seed < seeds.get((run.arm, run.epochs), 0)]


def _at(run: RunSettings, scale: Scale, train_size: int | None) -> RunSettings:
    """A run at a scale."""
    if scale != "smoke":
        return replace(run, train_size=train_size or DESIGNS[scale].train_size)
    return replace(
        run,
        data="generated",
        image_size=16,
        train_size=train_size or 64,
        test_size=16,
        batch_size=16,
        epochs=min(2, run.epochs),
        warmup=min(0.5, run.warmup),
        evaluate_every=1,
    )
