"""Mixup, CutMix and soft targets: convex, by area, and the loss they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lab.augment.mix import cutmix, mix, mixup, soft_targets


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 6, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Image i is i everywhere, and so is its label: what is mixed can be read off."""
    labels = torch.arange(count)
    return labels.float().view(-1, 1, 1, 1).expand(-1, 3, size, size).clone(), labels


def test_smoothed_targets_are_label_smoothing() -> None:
    logits, labels = torch.randn(5, 7, generator=generator()), torch.tensor([0, 6, 3, 3, 1])
    ours = F.cross_entropy(logits, soft_targets(labels, 7, 0.1), reduction="none")
    torch.testing.assert_close(
        ours, F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    )
    assert torch.equal(soft_targets(labels, 7), F.one_hot(labels, 7).float())


def test_smoothing_of_mixed_targets_is_smoothing_before_mixing() -> None:
    images, labels = batch()
    logits = torch.randn(6, 6, generator=generator())
    _, hard = mixup(images, soft_targets(labels, 6), 0.3)
    _, smoothed = mixup(images, soft_targets(labels, 6, 0.1), 0.3)
    torch.testing.assert_close(
        F.cross_entropy(logits, hard, label_smoothing=0.1), F.cross_entropy(logits, smoothed)
    )


def test_mixup_one_image_at_a_time() -> None:
    images, labels = batch(5)
    mixed, targets = mixup(images, soft_targets(labels, 5), 0.7)
    for i in range(5):
        j = 4 - i
        torch.testing.assert_close(mixed[i], torch.full_like(mixed[i], 0.7 * i + 0.3 * j))
        expected = 0.7 * F.one_hot(labels[i], 5) + 0.3 * F.one_hot(labels[j], 5)
        torch.testing.assert_close(targets[i], expected)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_cutmix_targets_are_the_area(share: float) -> None:
    images, labels = batch(6, 16)
    for seed in range(20):
        mixed, targets = cutmix(images, soft_targets(labels, 6), share, generator(seed))
        for i in range(6):
            assert set(mixed[i].unique().tolist()) <= {float(i), float(5 - i)}
            own = (mixed[i] == i).float().mean()
            assert targets[i, i] == pytest.approx(float(own), abs=1e-6)
            assert targets[i, 5 - i] == pytest.approx(1 - float(own), abs=1e-6)
        # At most the share asked for, up to rounding of the sides; less if cut off at the border.
        assert 1 - float(targets[0, 0]) <= 1 - share + 0.15


def test_cutmix_box_is_the_same_in_all_images_and_leaves_the_batch_alone() -> None:
    images, labels = batch()
    before = images.clone()
    mixed, _ = cutmix(images, soft_targets(labels, 6), 0.5, generator())
    changed = mixed != images
    assert (changed == changed[:1, :1]).all()
    assert torch.equal(images, before)


def test_half_of_the_batches_are_cut_and_half_blended() -> None:
    images, labels = batch()
    cut = 0
    for seed in range(200):
        mixed, targets = mix(images, labels, 6, generator(seed), mixup_alpha=0.8, cutmix_alpha=1.0)
        cut += bool((mixed == mixed.round()).all())
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(6))
        assert (targets >= 0).all()
        # The mean of what is mixed is mixed as the targets are, in blends and cuts alike.
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ labels.float())
    assert 70 < cut < 130  # 100, give or take 7 (one deviation)


def test_an_alpha_of_zero_switches_off() -> None:
    images, labels = batch()
    for seed in range(10):
        blended, _ = mix(images, labels, 6, generator(seed), mixup_alpha=1.0, cutmix_alpha=0.0)
        assert not torch.equal(blended, blended.round())
        cut, _ = mix(images, labels, 6, generator(seed), mixup_alpha=0.0, cutmix_alpha=1.0)
        assert torch.equal(cut, cut.round())


def test_share_follows_beta() -> None:
    """With alpha 0.8: mean 1/2, variance 1 / (4 (2 alpha + 1))."""
    images, labels = batch(2, 2)
    shares = torch.stack(
        [
            mix(images, labels, 2, generator(seed), mixup_alpha=0.8, cutmix_alpha=0.0)[1][0, 0]
            for seed in range(1500)
        ]
    )
    assert shares.mean() == pytest.approx(0.5, abs=0.03)  # a deviation is 0.008
    assert shares.var() == pytest.approx(1 / (4 * 2.6), rel=0.1)
