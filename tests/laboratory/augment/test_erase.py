"""Random erasing: one box of noise, in the share of images asked for."""

from __future__ import annotations

import pytest
import torch

from lab.augment.erase import random_erase


def erase(count: int, chance: float, size: int = 16) -> torch.Tensor:
    """Where pixels changed, in images that no noise can equal; bool [B, C, H, W]."""
    images = torch.full((count, 3, size, size), 1e6)
    return random_erase(images, chance, torch.Generator().manual_seed(0)) != 1e6


def test_changed_pixels_are_one_box_in_all_channels() -> None:
    for changed in erase(50, chance=1.0):
        assert torch.equal(changed[0], changed[1])
        assert torch.equal(changed[0], changed[2])
        rows, columns = changed[0].any(dim=1), changed[0].any(dim=0)
        assert torch.equal(changed[0], rows[:, None] & columns[None, :])
        for line in (rows, columns):
            places = line.nonzero().flatten()
            assert int(places[-1] - places[0]) + 1 == len(places)


def test_share_of_images_and_of_their_area() -> None:
    changed = erase(3000, chance=0.25)
    hit = changed.flatten(1).any(dim=1)
    assert hit.float().mean() == pytest.approx(0.25, abs=0.03)  # a deviation is 0.008
    area = changed[hit][:, 0].flatten(1).float().mean(dim=1)
    # Between 2% and a third, with sides rounded to whole pixels.
    assert 0.015 < float(area.min()) < 0.04
    assert 0.3 < float(area.max()) < 0.36


def test_no_chance_changes_nothing() -> None:
    assert not erase(20, chance=0.0).any()


def test_noise_is_standard_normal() -> None:
    images = torch.full((200, 3, 16, 16), 1e6)
    erased = random_erase(images, 1.0, torch.Generator().manual_seed(0))
    noise = erased[erased != 1e6]
    assert len(noise) > 10_000
    assert noise.mean() == pytest.approx(0.0, abs=0.05)
    assert noise.std() == pytest.approx(1.0, abs=0.05)
