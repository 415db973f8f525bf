"""Crops and flips: where their content comes from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lab.augment.crops import (
    centre_crop,
    random_boxes,
    random_crop,
    random_flip,
    reflected,
    resized_crop,
)
from laboratory.augment.oracle import difference, random_images


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_crop_is_a_window_of_the_padded_image_and_all_windows_occur() -> None:
    padding, size = 1, 5
    image = random_images(1, size)
    crops = random_crop(image.expand(200, -1, -1, -1), padding, generator())
    padded = F.pad(image[0], (padding,) * 4)
    places = [(top, left) for top in range(3) for left in range(3)]
    windows = [padded[:, top : top + size, left : left + size] for top, left in places]
    found = {
        next(place for place, window in enumerate(windows) if torch.equal(crop, window))
        for crop in crops
    }
    assert found == set(range(9))


@pytest.mark.parametrize("padding", [1, 2])
def test_reflected_padding_is_torchs_own(padding: int) -> None:
    images = random_images(3, 5)
    expected = F.pad(images.float(), (padding,) * 4, mode="reflect").to(images.dtype)
    assert torch.equal(reflected(images, padding), expected)
    crops = random_crop(images, padding, generator(), reflect=True)
    top, left = torch.randint(2 * padding + 1, (2, 3), generator=generator())
    for crop, whole, y, x in zip(crops, expected, top, left, strict=True):
        assert torch.equal(crop, whole[:, y : y + 5, x : x + 5])


def test_flips_are_of_whole_images_about_half_of_them() -> None:
    images = random_images(1, 6).expand(400, -1, -1, -1)
    flipped = random_flip(images, generator())
    mirrored = (flipped == images.flip(3)).flatten(1).all(dim=1)
    same = (flipped == images).flatten(1).all(dim=1)
    assert (mirrored ^ same).all()
    # 400 throws of a coin: 200, give or take 10 (one deviation).
    assert 150 < int(mirrored.sum()) < 250


def test_flipping_again_with_the_same_state_undoes_it() -> None:
    images = random_images(8)
    assert torch.equal(random_flip(random_flip(images, generator(3)), generator(3)), images)


def test_boxes_lie_inside_and_have_the_area_and_aspect_asked_for() -> None:
    sizes = torch.tensor([[64, 64], [40, 90]]).repeat(500, 1)
    top, left, tall, wide = random_boxes(sizes, generator(), area=(0.2, 0.6)).unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + tall <= sizes[:, 0]).all()
    assert (left + wide <= sizes[:, 1]).all()
    share = tall * wide / sizes.prod(dim=1)
    aspect = wide / tall
    # Sides are rounded to whole pixels, 17 or more of them: a few percent each.
    assert (share > 0.2 * 0.93).all()
    assert (share < 0.6 * 1.07).all()
    assert (aspect > 0.75 * 0.93).all()
    assert (aspect < 4 / 3 * 1.07).all()
    assert share.mean() == pytest.approx(0.4, abs=0.03)


def test_boxes_reach_every_border() -> None:
    sizes = torch.tensor([[8, 8]]).repeat(2000, 1)
    top, left, tall, wide = random_boxes(sizes, generator(), area=(0.2, 0.5)).unbind(1)
    for start, side in ((top, tall), (left, wide)):
        assert int(start.min()) == 0
        assert int((start + side).max()) == 8


def test_a_box_that_never_fits_is_the_middle() -> None:
    sizes = torch.tensor([[10, 200]])
    box = random_boxes(sizes, generator(), area=(0.9, 1.0))
    assert box.tolist() == [[0, 95, 10, 10]]


def test_resized_crop_of_a_box_of_the_same_size_is_its_content() -> None:
    images = random_images(3, 12)
    boxes = torch.tensor([[0, 0, 6, 6], [3, 2, 6, 6], [6, 6, 6, 6]])
    crops = resized_crop(images, boxes, 6)
    for crop, image, (top, left, _, _) in zip(crops, images, boxes.tolist(), strict=True):
        assert torch.equal(crop, image[:, top : top + 6, left : left + 6])


def test_resized_crop_against_floats() -> None:
    image = random_images(1, 20)[0]
    ours = resized_crop([image], torch.tensor([[2, 3, 15, 9]]), 8)[0]
    expected = F.interpolate(
        image[None, :, 2:17, 3:12].double(), size=(8, 8), mode="bicubic", antialias=True
    )[0]
    # Bytes are resized in whole numbers, one direction after the other.
    assert difference(ours, expected.round().clamp(0, 255)) <= 2


def test_centre_crop() -> None:
    image = torch.zeros(3, 64, 128, dtype=torch.uint8)
    image[:, 12:52, 44:84] = 200  # the middle, 40 x 40
    crop = centre_crop(image, 32)  # short side to 36: the middle becomes 22.5 wide
    assert crop.shape == (3, 32, 32)
    assert (crop[:, 7:25, 7:25] == 200).all()
    assert not crop[:, :3].any()
    assert torch.equal(crop, crop.flip(2))


@pytest.mark.parametrize("height", [33, 47])
def test_centre_crop_of_odd_sizes_fits(height: int) -> None:
    image = torch.zeros(3, height, 71, dtype=torch.uint8)
    assert centre_crop(image, 28).shape == (3, 28, 28)


def test_the_same_state_gives_the_same_crops() -> None:
    images = random_images(16)
    assert torch.equal(random_crop(images, 4, generator(5)), random_crop(images, 4, generator(5)))
    assert not torch.equal(
        random_crop(images, 4, generator(5)), random_crop(images, 4, generator(6))
    )
