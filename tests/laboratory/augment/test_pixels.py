"""Colour operations against Pillow, one image at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from lab.augment import pixels
from laboratory.augment.oracle import difference, from_pillow, random_images, to_pillow

Pillow = Callable[[Image.Image, float], Image.Image]


def _solarize_add(image: Image.Image, amount: float) -> Image.Image:
    return image.point([min(255, i + int(amount)) if i < 128 else i for i in range(256)] * 3)


CASES: list[tuple[str, Pillow, list[float]]] = [
    ("invert", lambda image, _: ImageOps.invert(image), [0, 0, 0, 0]),
    ("auto_contrast", lambda image, _: ImageOps.autocontrast(image), [0, 0, 0, 0]),
    ("equalize", lambda image, _: ImageOps.equalize(image), [0, 0, 0, 0]),
    ("posterize", lambda image, bits: ImageOps.posterize(image, round(bits)), [1, 4, 4.9, 8]),
    ("solarize", lambda image, at: ImageOps.solarize(image, at), [0, 26, 128.5, 256]),
    ("solarize_add", _solarize_add, [0, 50, 99, 110]),
    ("colour", lambda i, by: ImageEnhance.Color(i).enhance(by), [0.1, 1.0, 1.5, 1.9]),
    ("contrast", lambda i, by: ImageEnhance.Contrast(i).enhance(by), [0.1, 1.0, 1.5, 1.9]),
    ("brightness", lambda i, by: ImageEnhance.Brightness(i).enhance(by), [0.1, 1.0, 1.5, 1.9]),
    ("sharpness", lambda i, by: ImageEnhance.Sharpness(i).enhance(by), [0.1, 1.0, 1.5, 1.9]),
]
EXACT = {"invert", "posterize", "solarize", "solarize_add", "equalize"}


@pytest.mark.parametrize(("name", "pillow", "amounts"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("size", [2, 16, 40])
def test_as_pillow(name: str, pillow: Pillow, amounts: list[float], size: int) -> None:
    images = random_images(4, size)
    ours = getattr(pixels, name)(images, torch.tensor(amounts, dtype=torch.float32))
    assert ours.dtype == torch.uint8
    for image, amount, result in zip(images, amounts, ours, strict=True):
        expected = from_pillow(pillow(to_pillow(image), amount))
        # The others are rounded down in float32 or, by Pillow, in double: 254 may be 255.
        assert difference(result, expected) <= (0 if name in EXACT else 1)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_the_batch_is_left_alone(name: str) -> None:
    images = random_images()
    before = images.clone()
    getattr(pixels, name)(images, torch.tensor([1.5] * 4))
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", ["colour", "contrast", "brightness", "sharpness"])
def test_an_amount_of_one_changes_nothing(name: str) -> None:
    images = random_images()
    assert torch.equal(getattr(pixels, name)(images, torch.ones(4)), images)


def test_inverting_twice_changes_nothing() -> None:
    images, none = random_images(), torch.zeros(4)
    assert torch.equal(pixels.invert(pixels.invert(images, none), none), images)
