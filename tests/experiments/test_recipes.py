"""Same seed, same start; schedules begin above 0 and end near it."""

from __future__ import annotations

import pytest
import torch

from primum.experiments.recipes import (
    RECIPES,
    Recipe,
    build_model,
    build_optimizer,
    build_schedule,
)

BOTH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@BOTH
def test_the_seed_decides_the_first_parameters_and_nothing_else(recipe: Recipe) -> None:
    state = torch.get_rng_state()
    first, second, other = (build_model(recipe, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert torch.equal(torch.get_rng_state(), state)


@BOTH
def test_schedule(recipe: Recipe) -> None:
    model = build_model(recipe, 0)
    optimizer = build_optimizer(recipe, model, lr=2.0)
    schedule = build_schedule(recipe, optimizer)
    rates = []
    for _ in range(recipe.steps):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(2.0)
    assert rates.index(max(rates)) == round(recipe.warmup * recipe.steps)
    assert min(rates) > 0
    assert rates[-1] < 0.01
