"""Digits and generated images: the same every time, and made to be learned."""

from __future__ import annotations

import pytest
import torch

from lab.images import Batches, DataError, DataSettings, load_data
from lab.images.made import DEVIATION, GREY, digits, generated, noisy_digits


def test_digits_are_the_demos_up_to_rounding() -> None:
    train, labels, test, test_labels = digits(500)
    clean, clean_labels, _, clean_test_labels = noisy_digits(500)
    assert train.shape == (500, 3, 8, 8)
    assert test.shape == (1297, 3, 8, 8)
    assert torch.equal(labels, clean_labels)
    assert torch.equal(test_labels, clean_test_labels)
    back = (train.float() - GREY) / DEVIATION
    torch.testing.assert_close(
        back, clean.expand(-1, 3, -1, -1), rtol=0, atol=0.5 / DEVIATION + 1e-6
    )


@pytest.mark.parametrize("size", [0, 1797])
def test_impossible_number_of_digits(size: int) -> None:
    with pytest.raises(DataError, match=f"between 1 and 1796, got {size}"):
        digits(size)


def test_generated_images_are_the_same_every_time() -> None:
    settings = DataSettings("generated", train_size=30, test_size=20, image_size=16, classes=7)
    first, second = generated(settings), generated(settings)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert first[0].shape == (30, 3, 16, 16)
    assert first[2].shape == (20, 3, 16, 16)
    assert first[0].dtype == torch.uint8
    assert first[1].bincount().tolist() == [5, 5, 4, 4, 4, 4, 4]
    assert not torch.equal(first[0][:20], first[2])


def test_classes_can_be_told_apart_but_not_at_a_glance() -> None:
    """The nearest class mean is right more often than chance, and not always."""
    train, labels, test, test_labels = generated(DataSettings("generated"))
    means = torch.stack([train[labels == c].float().mean(dim=0) for c in range(10)])
    distance = torch.cdist(test.float().flatten(1), means.flatten(1))
    accuracy = (distance.argmin(dim=1) == test_labels).float().mean()
    assert 0.5 < accuracy <= 1.0
    pixel = (train[:, 0, 0, 0].float()[:, None] - means[:, 0, 0, 0]).abs().argmin(dim=1)
    assert (pixel == labels).float().mean() < 0.4


def test_a_shift_is_a_roll_of_the_pattern() -> None:
    """Without noise, every image would be one of the rolls of its class's pattern."""
    from lab.images import made

    patterns = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8) / 100
    drawn: list[torch.Tensor] = []
    original = torch.randn

    def no_noise(*size: int, generator: torch.Generator) -> torch.Tensor:
        drawn.append(original(1))
        return torch.zeros(*size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", no_noise)
        images, labels = made._draw(patterns, 6, torch.Generator().manual_seed(0))
    assert drawn
    for image, label in zip(images, labels.tolist(), strict=True):
        pattern = (GREY + DEVIATION * patterns[label]).round().clamp(0, 255).to(torch.uint8)
        rolls = [pattern.roll((i, j), (1, 2)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        assert any(torch.equal(image, roll) for roll in rolls)


def test_noisy_digits_are_standardised_and_noise_adds_its_variance() -> None:
    clean, noisy = noisy_digits(512, 0.0)[0], noisy_digits(512, 0.5)[0]
    assert clean.shape == (512, 1, 8, 8)
    assert clean.mean().abs() < 1e-5
    assert clean.var(correction=0) == pytest.approx(1.0, abs=1e-4)
    # 512 x 64 draws: the variance of the noise is known to about 1%.
    assert (noisy - clean).var() == pytest.approx(0.25, rel=0.05)
    assert torch.equal(noisy_digits(512, 0.0)[3], noisy_digits(512, 0.5)[3])


def test_noisy_digits_reach_the_model_as_they_are() -> None:
    data = load_data(DataSettings("noisy-digits", train_size=100))
    batch = next(Batches(data.train, data, batch_size=10, shuffle=False).epoch(0))
    assert torch.equal(batch.inputs, noisy_digits(100)[0][:10])
    assert (data.classes, data.image_size) == (10, 8)
