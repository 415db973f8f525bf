"""RandAugment, and AutoAugment's policy for CIFAR-10.

A policy draws an operation and its strength for each image. Images with the same operation are
processed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.augment import pixels, warps

Operation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Strength:
    """An operation, and its amount for a level from 0 to 1: `start + level * slope`.

    If `signed`, the slope gets a random sign; if `whole`, the amount is rounded down.
    """

    operation: Operation
    start: float = 0.0
    slope: float = 0.0
    signed: bool = False
    whole: bool = False

    def amount(self, level: Tensor, sign: Tensor) -> Tensor:
        """Levels and signs [B] -> amounts [B]."""
        part = level * self.slope * (sign if self.signed else 1.0)
        return self.start + (part.trunc() if self.whole else part)


# RandAugment as in the ConvNeXt recipe, in which every operation gets stronger with its level
# (timm's "inc1"); enhancements range from 0.1 to 1.9, where 1 changes nothing.
RAND_AUGMENT: tuple[Strength, ...] = (
    Strength(pixels.auto_contrast),
    Strength(pixels.equalize),
    Strength(pixels.invert),
    Strength(warps.rotate, 0.0, 30.0, signed=True),
    Strength(pixels.posterize, 4.0, -4.0, whole=True),
    Strength(pixels.solarize, 256.0, -256.0, whole=True),
    Strength(pixels.solarize_add, 0.0, 110.0, whole=True),
    Strength(pixels.colour, 1.0, 0.9, signed=True),
    Strength(pixels.contrast, 1.0, 0.9, signed=True),
    Strength(pixels.brightness, 1.0, 0.9, signed=True),
    Strength(pixels.sharpness, 1.0, 0.9, signed=True),
    Strength(warps.shear_x, 0.0, 0.3, signed=True),
    Strength(warps.shear_y, 0.0, 0.3, signed=True),
    Strength(warps.translate_x, 0.0, 0.45, signed=True),
    Strength(warps.translate_y, 0.0, 0.45, signed=True),
)


def rand_augment(images: Tensor, generator: torch.Generator, *, operations: int = 2) -> Tensor:
    """Apply `operations` random operations to each image, each with probability 1/2.

    The level is normally distributed around 9 (out of 10) with deviation 0.5.
    Shapes: uint8 [B, 3, H, W] -> the same.
    """
    count = len(images)
    for _ in range(operations):
        choice = torch.randint(len(RAND_AUGMENT), (count,), generator=generator)
        choice[torch.rand(count, generator=generator) >= 0.5] = -1
        level = (9.0 + 0.5 * torch.randn(count, generator=generator)).clamp(0, 10) / 10
        images = _apply(images, RAND_AUGMENT, choice, level, _signs(count, generator))
    return images


_AUTO: dict[str, Strength] = {
    "shear x": Strength(warps.shear_x, 0.0, 0.3, signed=True),
    "shear y": Strength(warps.shear_y, 0.0, 0.3, signed=True),
    "translate x": Strength(warps.translate_x, 0.0, 150 / 331, signed=True),
    "translate y": Strength(warps.translate_y, 0.0, 150 / 331, signed=True),
    "rotate": Strength(warps.rotate, 0.0, 30.0, signed=True),
    "colour": Strength(pixels.colour, 1.0, 0.9, signed=True),
    "contrast": Strength(pixels.contrast, 1.0, 0.9, signed=True),
    "sharpness": Strength(pixels.sharpness, 1.0, 0.9, signed=True),
    "brightness": Strength(pixels.brightness, 1.0, 0.9, signed=True),
    "posterize": Strength(pixels.posterize, 8.0, -4.0),
    "solarize": Strength(pixels.solarize, 256.0, -256.0),
    "auto contrast": Strength(pixels.auto_contrast),
    "equalize": Strength(pixels.equalize),
    "invert": Strength(pixels.invert),
}

# AutoAugment (Cubuk et al., 2019), policy found for CIFAR-10: pairs of operations with probability
# in tenths and level in ninths. One pair is drawn for each image.
_CIFAR10_POLICY = """
invert 1 7, contrast 2 6
rotate 7 2, translate x 3 9
sharpness 8 1, sharpness 9 3
shear y 5 8, translate y 7 9
auto contrast 5 8, equalize 9 2
shear y 2 7, posterize 3 7
colour 4 3, brightness 6 7
sharpness 3 9, brightness 7 9
equalize 6 5, equalize 5 1
contrast 6 7, sharpness 6 5
colour 7 7, translate x 5 8
equalize 3 7, auto contrast 4 8
translate y 4 3, sharpness 2 6
brightness 9 6, colour 2 8
solarize 5 2, invert 0 3
equalize 2 0, auto contrast 6 0
equalize 2 8, equalize 6 4
colour 9 9, equalize 6 6
auto contrast 8 4, solarize 2 8
brightness 1 3, colour 7 0
solarize 4 5, auto contrast 9 3
translate y 9 9, translate y 7 9
auto contrast 9 2, solarize 8 3
equalize 8 8, invert 1 3
translate y 7 9, auto contrast 9 1
"""


def _parse(policy: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operation indices, probabilities and levels, each [pairs, 2]."""
    numbers = {name: number for number, name in enumerate(_AUTO)}
    steps = [step.rsplit(maxsplit=2) for step in policy.strip().replace("\n", ", ").split(", ")]
    choices, chances, levels = zip(
        *((numbers[name], int(chance) / 10, int(level) / 9) for name, chance, level in steps),
        strict=True,
    )
    choice, chance, level = (torch.tensor(each) for each in (choices, chances, levels))
    return choice.view(-1, 2), chance.view(-1, 2), level.view(-1, 2)


_CHOICES, _CHANCES, _LEVELS = _parse(_CIFAR10_POLICY)


def auto_augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply one of the CIFAR-10 policy's 25 pairs to each image. Shapes: uint8 [B, 3, H, W]."""
    count = len(images)
    pair = torch.randint(len(_CHOICES), (count,), generator=generator)
    for place in (0, 1):
        choice = _CHOICES[pair, place].clone()
        choice[torch.rand(count, generator=generator) >= _CHANCES[pair, place]] = -1
        signs = _signs(count, generator)
        images = _apply(images, tuple(_AUTO.values()), choice, _LEVELS[pair, place], signs)
    return images


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (count,), generator=generator) * 2.0 - 1.0


def _apply(
    images: Tensor, table: tuple[Strength, ...], choice: Tensor, level: Tensor, sign: Tensor
) -> Tensor:
    """Apply to each image the operation with its index; -1 for none."""
    result = images.clone()
    for number, strength in enumerate(table):
        rows = (choice == number).nonzero().flatten()
        if len(rows):
            amount = strength.amount(level[rows], sign[rows])
            result[rows] = strength.operation(images[rows], amount)
    return result
