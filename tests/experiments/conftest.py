"""Made-up results: what the table, the verdict and the page are tested on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from primum.experiments.arms import ARMS
from primum.experiments.recipes import RECIPES, Recipe
from primum.experiments.results import Results, environment
from primum.experiments.timing import StepTime
from primum.experiments.train import Batch, Run, Settings

MakeResults = Callable[..., Results]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As in the demo: the same sums on every machine."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Recipe:
    """A recipe of four steps."""
    return replace(RECIPES["cnn-sgd"], epochs=2, train_size=64, batch_size=32)


@pytest.fixture
def make_results() -> MakeResults:
    """Results whose arms differ from base by as many points of accuracy as asked for."""

    def make(gains: dict[str, float] | None = None, seeds: int = 3) -> Results:
        gains = dict.fromkeys(ARMS, 0.0) if gains is None else gains
        recipes = [replace(recipe, epochs=2) for recipe in RECIPES.values()]
        runs = [
            _run(Settings(recipe, arm, seed), gain)
            for recipe in recipes
            for arm, gain in gains.items()
            for seed in range(seeds)
        ]
        times = [
            StepTime(run.settings.recipe.name, run.settings.arm, run.settings.seed, 2.0)
            for run in runs
        ]
        return Results(tuple(runs), tuple(times), 1.5, "primum demo --seeds 3", environment(2))

    return make


def _run(settings: Settings, gain: float) -> Run:
    seed, steps = settings.seed, settings.recipe.steps
    accuracy = 0.8 + 0.001 * seed + 0.01 * gain
    return Run(
        settings=settings,
        train_loss=(2.0, 1.0),
        test_loss=(2.1, 1.2 + 0.001 * seed - 0.1 * gain),
        test_accuracy=(0.99, accuracy),  # the first epoch is better: it must not count
        harmed_before=(0.4,) * steps,
        harmed_after=(0.25,) * steps,
        extra_weight=(0.1,) * steps,
        batch=Batch(steps // 2, before=(0.1, -0.2, 0.3), after=(-0.05, -0.2, 0.1)),
        fallbacks=0,
    )
