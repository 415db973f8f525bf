"""What a step costs in each arm, apart from the runs themselves.

The base arm of a run is watched, and runs share the machine with each other; neither gives a fair
time. So the arms take turns here, a few steps each, alone and on one thread, base without being
watched. A slow moment of the machine then strikes all arms alike, and the median ignores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from primum.experiments import data
from primum.experiments.arms import TIMED
from primum.experiments.recipes import Recipe, build_model, build_optimizer
from primum.experiments.train import epochs

STEPS_PER_TURN = 4


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of a step, for one recipe, arm and seed."""

    recipe: str
    arm: str
    seed: int
    milliseconds: float


def time_steps(recipe: Recipe, arms: Sequence[str], seed: int, turns: int) -> list[StepTime]:
    """Median step time per arm over `turns` rounds, after one round that is not counted."""
    digits = data.load(recipe.train_size, recipe.noise)
    steps = {}
    for arm in arms:
        model = build_model(recipe, seed).train()
        optimizer = build_optimizer(recipe, model, recipe.lr)
        steps[arm] = TIMED[arm](model, optimizer, recipe.radius, seed)
    rows = next(epochs(recipe, seed))[0]
    images, labels = digits.train_images[rows], digits.train_labels[rows]
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(turns + 1):
        for arm in arms:
            for _ in range(STEPS_PER_TURN):
                start = perf_counter()
                steps[arm](images, labels)
                if turn > 0:
                    times[arm].append(1e3 * (perf_counter() - start))
    return [StepTime(recipe.name, arm, seed, median(times[arm])) for arm in arms]
