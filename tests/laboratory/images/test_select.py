"""Subsets, label noise, mean and deviation."""

from __future__ import annotations

import pytest
import torch

from lab.images import DataError
from lab.images.select import add_label_noise, mean_and_std, subset

LABELS = torch.tensor([0, 0, 0, 1, 2, 1, 0, 2, 1, 2])


def test_all_and_the_first() -> None:
    for size, expected in ((None, 10), (4, 4), (10, 10)):
        rows = subset(LABELS, size, 3, balanced=False, part="train")
        assert rows.tolist() == list(range(expected))


def test_balanced_takes_the_first_of_each_class_in_order() -> None:
    assert subset(LABELS, 6, 3, balanced=True, part="train").tolist() == [0, 1, 3, 4, 5, 7]
    seven = subset(LABELS, 7, 3, balanced=True, part="train")
    assert LABELS[seven].bincount().tolist() == [3, 2, 2]


def test_too_many() -> None:
    with pytest.raises(DataError, match="test_size is 11, but there are 10 test images"):
        subset(LABELS, 11, 3, balanced=False, part="test")
    with pytest.raises(DataError, match="needs 5 images of class 0, but there are 4"):
        subset(LABELS, 10, 2, balanced=True, part="train")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 1.0])
def test_noise_is_a_share_of_wrong_labels(share: float) -> None:
    labels = torch.arange(1000) % 10
    noisy = add_label_noise(labels, share, 10, seed=3)
    assert int((noisy != labels).sum()) == round(1000 * share)
    assert int(noisy.min()) >= 0
    assert int(noisy.max()) <= 9


def test_wrong_labels_are_spread_over_all_other_classes() -> None:
    labels = torch.zeros(9000, dtype=torch.int64)
    noisy = add_label_noise(labels, 1.0, 10, seed=0)
    counts = noisy.bincount(minlength=10)
    assert counts[0] == 0
    assert (counts[1:] - 1000).abs().max() < 150  # a deviation is 30


def test_noise_depends_on_its_seed_alone() -> None:
    labels = torch.arange(100) % 10
    first, second, other = (add_label_noise(labels, 0.3, 10, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_mean_and_std_are_those_of_all_pixels() -> None:
    images = torch.randint(256, (50, 3, 6, 6), dtype=torch.uint8)
    mean, std = mean_and_std(images)
    floats = images.double() / 255
    assert mean == pytest.approx(floats.mean(dim=(0, 2, 3)).tolist(), rel=1e-12)
    assert std == pytest.approx(floats.std(dim=(0, 2, 3), correction=0).tolist(), rel=1e-12)


def test_a_constant_channel_does_not_divide_by_zero() -> None:
    _, std = mean_and_std(torch.full((2, 3, 4, 4), 9, dtype=torch.uint8))
    assert std == pytest.approx([1 / 255] * 3)
