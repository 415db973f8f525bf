"""What makes a control a control."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from primum.experiments.arms import ARMS, TIMED, Step, deal
from primum.experiments.recipes import RECIPES, Recipe, build_model, build_optimizer

BOTH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def _setup(recipe: Recipe, make: str, timed: bool = False) -> tuple[nn.Module, Step]:
    model = build_model(recipe, 0)
    optimizer = build_optimizer(recipe, model, recipe.lr)
    makers = TIMED if timed else ARMS
    return model, makers[make](model, optimizer, recipe.radius, 0)


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 1, 8, 8, generator=generator),
            torch.randint(10, (32,), generator=generator),
        )
        for _ in range(count)
    ]


def test_dealing_keeps_the_weights_and_changes_their_owners() -> None:
    weights = torch.rand(64)
    dealt = deal(weights, torch.Generator().manual_seed(0))
    assert torch.equal(dealt.sort().values, weights.sort().values)
    assert not torch.equal(dealt, weights)


@BOTH
def test_base_is_plain_training_bit_for_bit(recipe: Recipe) -> None:
    watched, watched_step = _setup(recipe, "base")
    plain, plain_step = _setup(recipe, "base", timed=True)
    for images, labels in _batches(5):
        loss, report = watched_step(images, labels)
        assert torch.equal(loss, plain_step(images, labels)[0])
        assert report is not None
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@BOTH
def test_permuted_trains_on_the_weights_in_another_order(recipe: Recipe) -> None:
    model, step = _setup(recipe, "permuted")
    twin = build_model(recipe, 0)
    optimizer = build_optimizer(recipe, twin, recipe.lr)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for images, labels in _batches(4):
        loss, report = step(images, labels)
        assert report is not None
        total += float(report.extra_weights.sum())
        optimizer.zero_grad()
        losses = F.cross_entropy(twin(images), labels, reduction="none")
        ((1 + deal(report.extra_weights, generator)) * losses).mean().backward()
        optimizer.step()
        assert loss == losses.mean()
    assert total > 0
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@BOTH
def test_primum_differs_from_base_and_reduces_harm(recipe: Recipe) -> None:
    reduced, reduced_step = _setup(recipe, "primum")
    plain, plain_step = _setup(recipe, "base")
    before = after = 0.0
    for images, labels in _batches(5):
        _, report = reduced_step(images, labels)
        plain_step(images, labels)
        assert report is not None
        before += float(report.harm_before)
        after += float(report.harm_after)
    assert after < before
    assert not torch.equal(reduced.get_parameter("head.weight"), plain.get_parameter("head.weight"))


def test_the_head_is_found_without_being_told() -> None:
    recipe = RECIPES["transformer-adamw"]
    model = build_model(recipe, 0)
    optimizer = build_optimizer(recipe, model, recipe.lr)
    primum.attach(model, optimizer)
    with pytest.raises(ValueError):  # attaching twice to the same head is an error
        primum.attach(model, optimizer, head="head")
