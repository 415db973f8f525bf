"""Recipes: what they do, in which order, and again."""

from __future__ import annotations

import pytest
import torch

from lab.augment import AUGMENTATIONS, Augmentation
from laboratory.augment.oracle import random_images


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_none_does_nothing() -> None:
    images, labels = random_images(4), torch.arange(4)
    none = AUGMENTATIONS["none"]
    assert none.on_bytes(images, generator()) is images
    floats, targets = none.on_floats(images.float(), labels, 10, generator())
    assert torch.equal(floats, images.float())
    assert targets is labels


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_state_gives_the_same_batch(name: str) -> None:
    recipe = AUGMENTATIONS[name]

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = generator(seed)
        images = recipe.crop(list(random_images(16)), 16, state)
        images = recipe.on_bytes(images, state)
        return recipe.on_floats(images.float(), torch.arange(16), 16, state)

    first, second, other = run(1), run(1), run(2)
    assert first[0].shape == (16, 3, 16, 16)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], other[0]) == (name == "none")


def test_only_mixing_gives_soft_targets() -> None:
    for name, recipe in AUGMENTATIONS.items():
        _, targets = recipe.on_floats(torch.zeros(4, 3, 8, 8), torch.arange(4), 10, generator())
        assert targets.ndim == (2 if name in ("convnext", "convnext-more") else 1)


def test_the_papers_stronger_setting() -> None:
    """Three operations instead of two, coefficients 1.0 and 1.2 instead of 0.8 and 1.0 (App. E)."""
    usual, more = AUGMENTATIONS["convnext"], AUGMENTATIONS["convnext-more"]
    assert (usual.operations, usual.mixup, usual.cutmix) == (2, 0.8, 1.0)
    assert (more.operations, more.mixup, more.cutmix) == (3, 1.0, 1.2)


def test_photographs_of_all_sizes_become_one_batch() -> None:
    photographs = [torch.zeros(3, *size, dtype=torch.uint8) for size in ((40, 60), (33, 20))]
    for recipe in (Augmentation(resized=True), Augmentation()):
        assert recipe.crop(photographs, 16, generator()).shape == (2, 3, 16, 16)
