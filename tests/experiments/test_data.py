"""The digits are the same every time, and no test image is trained on."""

from __future__ import annotations

import pytest
import torch

from primum.experiments import data


def test_the_same_call_gives_the_same_tensors() -> None:
    first, second = data.load(), data.load()
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_labels, second.test_labels)


def test_shapes_and_split() -> None:
    digits = data.load(train_size=500)
    assert digits.train_images.shape == (500, 1, 8, 8)
    assert digits.test_images.shape == (1297, 1, 8, 8)
    assert digits.train_labels.unique().tolist() == list(range(data.CLASSES))


def test_clean_training_pixels_are_standardised_and_noise_adds_its_variance() -> None:
    clean, noisy = data.load(noise=0.0).train_images, data.load(noise=0.5).train_images
    assert clean.mean().abs() < 1e-5
    assert clean.var(correction=0) == pytest.approx(1.0, abs=1e-4)
    # 512 x 64 draws: the variance of the noise is known to about 1%.
    assert (noisy - clean).var() == pytest.approx(0.25, rel=0.05)


def test_more_noise_leaves_the_split_alone() -> None:
    assert torch.equal(data.load(noise=0.0).test_labels, data.load(noise=1.0).test_labels)


@pytest.mark.parametrize("size", [0, 1797])
def test_impossible_split(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        data.load(train_size=size)
