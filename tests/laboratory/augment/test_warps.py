"""Shear, translation and rotation against Pillow's transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from PIL import Image

from lab.augment import warps
from laboratory.augment.oracle import difference, from_pillow, random_images, to_pillow

GREY = (warps.FILL,) * 3
Affine = Callable[[float, int], tuple[float, ...]]

MATRICES: dict[str, Affine] = {
    "shear_x": lambda amount, size: (1, amount, 0, 0, 1, 0),
    "shear_y": lambda amount, size: (1, 0, 0, amount, 1, 0),
    "translate_x": lambda amount, size: (1, 0, amount * size, 0, 1, 0),
    "translate_y": lambda amount, size: (1, 0, 0, 0, 1, amount * size),
}


@pytest.mark.parametrize("name", MATRICES)
def test_as_pillow(name: str) -> None:
    size, amounts = 16, [0.27, -0.1, 0.4, -0.33]
    images = random_images(4, size)
    ours = getattr(warps, name)(images, torch.tensor(amounts))
    for image, amount, result in zip(images, amounts, ours, strict=True):
        expected = to_pillow(image).transform(
            (size, size),
            Image.Transform.AFFINE,
            MATRICES[name](amount, size),
            resample=Image.Resampling.BILINEAR,
            fillcolor=GREY,
        )
        # Both interpolate linearly; places are float32 here and double there.
        assert difference(result, from_pillow(expected)) <= 1


def test_rotation_as_pillow() -> None:
    size, angles = 16, [27.0, -10.0, 90.0, 3.0]
    images = random_images(4, size)
    ours = warps.rotate(images, torch.tensor(angles))
    for image, angle, result in zip(images, angles, ours, strict=True):
        expected = from_pillow(
            to_pillow(image).rotate(angle, Image.Resampling.BILINEAR, fillcolor=GREY)
        )
        inner = (slice(None), slice(1, -1), slice(1, -1))  # at 90 degrees, borders are a tie
        assert difference(result[inner], expected[inner]) <= 1


def test_nothing_moves_by_nothing() -> None:
    images = random_images(4, 9)
    for name in (*MATRICES, "rotate"):
        assert torch.equal(getattr(warps, name)(images, torch.zeros(4)), images)


def test_a_shift_by_whole_pixels_moves_the_content_and_fills_with_grey() -> None:
    images = random_images(2, 8)
    moved = warps.translate_x(images, torch.tensor([0.25, -0.25]))
    assert torch.equal(moved[0, :, :, :6], images[0, :, :, 2:])
    assert (moved[0, :, :, 6:] == warps.FILL).all()
    assert torch.equal(moved[1, :, :, 2:], images[1, :, :, :6])
    assert (moved[1, :, :, :2] == warps.FILL).all()


def test_images_need_not_be_square() -> None:
    image = torch.arange(3 * 4 * 6, dtype=torch.uint8).view(1, 3, 4, 6)
    moved = warps.translate_y(image, torch.tensor([0.5]))
    assert torch.equal(moved[:, :, :2], image[:, :, 2:])
