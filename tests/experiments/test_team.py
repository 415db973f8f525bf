"""Several processes make the runs that one makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primum.experiments.recipes import RECIPES
from primum.experiments.team import team_of
from primum.experiments.train import Settings, train


def test_the_same_runs() -> None:
    """Up to rounding: sums over ranks are made in another order."""
    recipe = replace(next(iter(RECIPES.values())), epochs=2, train_size=128)
    grid = [Settings(recipe, arm, 0) for arm in ("base", "primum", "permuted")]
    with team_of(2) as team:
        found = list(team.train_all(grid))
    for run, settings in zip(found, grid, strict=True):
        expected = train(settings)
        assert run.settings == settings
        assert run.train_loss == pytest.approx(expected.train_loss, rel=1e-3)
        assert run.test_loss == pytest.approx(expected.test_loss, rel=1e-2)
        assert run.extra_weight == pytest.approx(expected.extra_weight, abs=0.02)
        assert run.fallbacks == 0
        assert len(run.batch.before) == recipe.batch_size
    assert found[1].extra_weight[-1] > 0


def test_an_error_in_a_rank_is_raised_here() -> None:
    recipe = replace(next(iter(RECIPES.values())), epochs=1, train_size=128)
    with pytest.raises(KeyError, match="no such arm"), team_of(2) as team:
        list(team.train_all([Settings(recipe, "no such arm", 0)]))
