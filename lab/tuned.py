"""The small networks at base's best learning rate, on 20,000 images: settings and runs.

Only base is tuned, with a seed that is not compared: all rates on a third of the schedule, then the
best and its neighbours on the full one. All arms use base's rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.arms import Arm
from lab.plan import plan
from lab.settings import RunSettings
from lab.speedrun import MAIN, TUNING_SEED
from lab.tutorial_runs import tiny

SEEDS, FEW = 5, 3  # of base and radius 0.4, of the other arms
CONTROLS = ("permuted@radius=0.4", "lr-matched@radius=0.4", "damped")


@dataclass(frozen=True)
class Tuned:
    """A setting and the learning rates tried for base; `run` has the best of them."""

    run: RunSettings
    rates: tuple[float, ...]

    @property
    def nearest(self) -> tuple[float, ...]:
        """The best rate and its neighbours."""
        place = self.rates.index(self.run.rate)
        return self.rates[max(place - 1, 0) : place + 2]


_IMAGES = RunSettings(train_size=20_000, evaluate_every=3)
_CNN = replace(_IMAGES, epochs=30)
_VIT = replace(_IMAGES, model="vit-micro", epochs=15, precision="bf16")
_RESNET = replace(_IMAGES, model="resnet20", epochs=15, precision="bf16")
_HUNDRED = replace(_IMAGES, data="cifar100", epochs=15)
RESNET_BATCH_NORM = Tuned(replace(_RESNET, norm="batch", lr=0.2), (0.05, 0.1, 0.2, 0.4))
SETTINGS = (
    Tuned(replace(_CNN, lr=0.2), (0.05, 0.1, 0.2, 0.4)),
    Tuned(replace(_CNN, optimizer="adamw", lr=0.008), (0.002, 0.004, 0.008, 0.016)),
    Tuned(replace(_VIT, optimizer="adamw", lr=0.002), (0.0005, 0.001, 0.002, 0.004)),
    Tuned(replace(_VIT, lr=0.2, precision="fp32"), (0.025, 0.05, 0.1, 0.2, 0.4)),
    Tuned(replace(_RESNET, lr=0.05), (0.025, 0.05, 0.1, 0.2)),
    Tuned(replace(_RESNET, optimizer="adamw", lr=0.004), (0.002, 0.004, 0.008)),
    Tuned(replace(_HUNDRED, optimizer="adamw", lr=0.008), (0.002, 0.004, 0.008, 0.016)),
    Tuned(replace(_CNN, norm="batch", lr=0.8), (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)),
    RESNET_BATCH_NORM,
)
# The rate that a third of the schedule prefers; the whole schedule prefers twice that.
HALF_RATE = replace(RESNET_BATCH_NORM.run, lr=0.1)


def rate_runs(*, smoke: bool = False) -> list[RunSettings]:
    """Tuning runs of base: all rates on a third of the schedule, then the nearest on all of it."""
    runs = []
    for setting in SETTINGS:
        epochs = setting.run.epochs
        for length, rates in ((epochs // 3, setting.rates), (epochs, setting.nearest)):
            run = replace(setting.run, epochs=length, evaluate_every=length, seed=TUNING_SEED)
            runs += [replace(run, lr=rate) for rate in rates]
    return [tiny(run) for run in runs[:2]] if smoke else runs


def tuned_runs(*, smoke: bool = False) -> list[RunSettings]:
    """Runs of base and radius 0.4 with five seeds, and three of the smaller radii, seed by seed.

    With batch norm, which came later, radius 0.4 alone is compared.
    """
    arms = [Arm.parse(arm) for arm in MAIN]
    points = [*(setting.run for setting in SETTINGS), HALF_RATE]
    if smoke:
        return [tiny(run) for run in plan(points[:1], arms, range(1))]
    runs = plan([run for run in points if run.norm != "batch"], arms, range(FEW))
    runs += plan(points, [arms[0], arms[-1]], range(SEEDS))
    return sorted({run.key: run for run in runs}.values(), key=lambda run: run.seed)


def control_runs(*, smoke: bool = False) -> list[RunSettings]:
    """ResNet-20 with batch norm at base's best rate: base, radius 0.4, and the controls."""
    main = [Arm.parse(arm) for arm in (MAIN[0], MAIN[-1])]
    arms = [*main, *(Arm.parse(arm) for arm in CONTROLS)]
    if smoke:
        return [tiny(run) for run in plan([SETTINGS[0].run], arms, range(1))]
    runs = plan([RESNET_BATCH_NORM.run], main, range(SEEDS))
    runs += plan([RESNET_BATCH_NORM.run], arms, range(FEW))
    return list({run.key: run for run in runs}.values())
