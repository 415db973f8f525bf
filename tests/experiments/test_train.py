"""A run: repeatable, comparable across arms, in the units it says."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import primum
from primum.experiments import data
from primum.experiments.arms import ARMS
from primum.experiments.recipes import RECIPES, Recipe, build_model, build_optimizer
from primum.experiments.train import Settings, _capture, epochs, train


@pytest.mark.parametrize("arm", ARMS)
def test_the_same_settings_give_the_same_run(arm: str, tiny: Recipe) -> None:
    settings = Settings(tiny, arm, seed=3)
    assert train(settings) == train(settings)


def test_lengths(tiny: Recipe) -> None:
    run = train(Settings(tiny, "primum", seed=0))
    assert len(run.train_loss) == len(run.test_loss) == len(run.test_accuracy) == tiny.epochs
    assert len(run.harmed_before) == len(run.harmed_after) == len(run.extra_weight) == tiny.steps
    assert len(run.batch.before) == len(run.batch.after) == tiny.batch_size
    assert run.batch.step == tiny.steps // 2
    assert run.fallbacks == 0


def test_arms_start_alike(tiny: Recipe) -> None:
    """The first step of a fresh optimizer starts from the same parameters and the same batch."""
    runs = [train(Settings(replace(tiny, epochs=1), arm, seed=1)) for arm in ("base", "permuted")]
    assert runs[0].harmed_before[0] == runs[1].harmed_before[0]


def test_epochs_hold_every_sample_at_most_once_and_follow_the_seed(tiny: Recipe) -> None:
    recipe = replace(tiny, train_size=70)
    first, again, other = (list(epochs(recipe, seed)) for seed in (0, 0, 1))
    assert [torch.cat(e).tolist() for e in first] == [torch.cat(e).tolist() for e in again]
    assert [torch.cat(e).tolist() for e in first] != [torch.cat(e).tolist() for e in other]
    for epoch in first:
        assert [len(rows) for rows in epoch] == [32, 32]
        assert len(torch.cat(epoch).unique()) == 64


def test_lr_matched_is_base_at_the_raised_learning_rate(tiny: Recipe) -> None:
    matched = train(Settings(tiny, "lr-matched", seed=2, lr_factor=1.25))
    raised = train(Settings(replace(tiny, lr=1.25 * tiny.lr), "base", seed=2))
    assert matched.test_loss == raised.test_loss
    assert matched.test_loss != train(Settings(tiny, "lr-matched", seed=2)).test_loss


@pytest.mark.parametrize("name", RECIPES)
def test_captured_changes_are_the_losses_derivative_along_the_heads_step(name: str) -> None:
    """Oracle: let a copy of the optimizer really step, and differentiate each sample's loss."""
    recipe = RECIPES[name]
    digits = data.load(recipe.train_size, recipe.noise)
    model = build_model(recipe, 0).double()
    lr = 1e-3
    optimizer = build_optimizer(recipe, model, lr)
    watcher = primum.observe(model, optimizer)
    for rows in list(epochs(recipe, 0).__next__())[:3]:
        images, labels = digits.train_images[rows].double(), digits.train_labels[rows]
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert watcher.last is not None
    captured = torch.tensor(_capture(watcher.last, 3, lr).before, dtype=torch.float64)
    moved = {key: model.state_dict()[key] - before[key] for key in ("head.weight", "head.bias")}

    def losses_at(size: torch.Tensor) -> torch.Tensor:
        at = {**before, **{key: before[key] + size * step for key, step in moved.items()}}
        logits = torch.func.functional_call(model, at, (images,))
        return F.cross_entropy(logits, labels, reduction="none")

    with torch.no_grad():
        _, expected = torch.func.jvp(
            losses_at,
            (torch.zeros((), dtype=torch.float64),),
            (torch.ones((), dtype=torch.float64),),
        )
    torch.testing.assert_close(captured, expected, rtol=1e-6, atol=1e-12)
