"""RandAugment and AutoAugment: which operation, how strong, for whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.augment import pixels, policies, warps
from lab.augment.policies import RAND_AUGMENT, Strength, auto_augment, rand_augment
from laboratory.augment.oracle import random_images


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strength(operation: policies.Operation) -> Strength:
    return next(each for each in RAND_AUGMENT if each.operation is operation)


@pytest.mark.parametrize(
    ("operation", "level", "expected"),
    [
        (warps.rotate, 0.9, [-27.0, 27.0]),
        (warps.shear_x, 1.0, [-0.3, 0.3]),
        (warps.translate_y, 0.9, [-0.405, 0.405]),
        (pixels.posterize, 0.9, [1.0, 1.0]),
        (pixels.posterize, 0.0, [4.0, 4.0]),
        (pixels.solarize, 0.9, [26.0, 26.0]),
        (pixels.solarize_add, 0.9, [99.0, 99.0]),
        (pixels.contrast, 1.0, [0.1, 1.9]),
        (pixels.colour, 0.0, [1.0, 1.0]),
    ],
)
def test_amounts_of_rand_augment(
    operation: policies.Operation, level: float, expected: list[float]
) -> None:
    """As in timm's "rand-m9-mstd0.5-inc1", which the ConvNeXt recipe names."""
    amount = strength(operation).amount(torch.full((2,), level), torch.tensor([-1.0, 1.0]))
    assert amount.tolist() == pytest.approx(expected, abs=1e-5)


def test_rand_augment_against_one_image_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with one operation are treated together; each must come out as if alone."""
    images = random_images(64, 8)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    apply = policies._apply

    def record(
        batch: Tensor, table: tuple[Strength, ...], choice: Tensor, level: Tensor, sign: Tensor
    ) -> Tensor:
        drawn.append((choice, level, sign))
        return apply(batch, table, choice, level, sign)

    monkeypatch.setattr(policies, "_apply", record)
    result = rand_augment(images, generator(), operations=3)
    assert len(drawn) == 3
    for row in range(64):
        image = images[row : row + 1]
        for choice, level, sign in drawn:
            if choice[row] >= 0:
                chosen = RAND_AUGMENT[int(choice[row])]
                amount = chosen.amount(level[row : row + 1], sign[row : row + 1])
                image = chosen.operation(image, amount)
        assert torch.equal(image[0], result[row])


def test_draws_of_rand_augment(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(batch: Tensor, table: object, *draws: Tensor) -> Tensor:
        drawn.append((draws[0], draws[1], draws[2]))
        return batch

    monkeypatch.setattr(policies, "_apply", record)
    rand_augment(torch.zeros(6000, 3, 1, 1, dtype=torch.uint8), generator(), operations=1)
    ((choice, level, sign),) = drawn
    left_alone = (choice < 0).float().mean()
    assert left_alone == pytest.approx(0.5, abs=0.03)  # a deviation is 0.006
    counts = choice[choice >= 0].bincount(minlength=15)
    assert len(counts) == 15
    assert counts.min() > 140  # 200 expected, a deviation is 14
    assert level.mean() == pytest.approx(0.9, abs=0.01)
    assert level.std() == pytest.approx(0.05, abs=0.01)  # less a little, cut off at 1
    assert level.max() <= 1.0
    assert set(sign.tolist()) == {-1.0, 1.0}


def test_auto_augment_has_25_pairs_within_their_ranges() -> None:
    choices, chances, levels = policies._CHOICES, policies._CHANCES, policies._LEVELS
    assert choices.shape == chances.shape == levels.shape == (25, 2)
    assert 0 <= float(chances.min()) <= float(chances.max()) <= 0.9
    assert 0 <= float(levels.min()) <= float(levels.max()) <= 1
    names = list(policies._AUTO)
    # First and last pair of the table in the AutoAugment article.
    assert [names[i] for i in choices[0]] == ["invert", "contrast"]
    assert chances[0].tolist() == pytest.approx([0.1, 0.2])
    assert levels[0].tolist() == pytest.approx([7 / 9, 6 / 9])
    assert [names[i] for i in choices[-1]] == ["translate y", "auto contrast"]


@pytest.mark.parametrize("augment", [rand_augment, auto_augment])
def test_the_same_state_gives_the_same_images(augment: policies.Operation) -> None:
    images = random_images(32)
    before = images.clone()
    first, second = augment(images, generator(1)), augment(images, generator(1))  # type: ignore[arg-type]
    assert torch.equal(first, second)
    assert not torch.equal(first, augment(images, generator(2)))  # type: ignore[arg-type]
    assert torch.equal(images, before)
    assert first.dtype == torch.uint8
    changed = (first != images).flatten(1).any(dim=1).float().mean()
    assert 0.3 < changed < 1.0
