"""The augmentations of each recipe of the paper, from stored bytes to the model's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lab.augment.crops import (
    centre_crop,
    random_boxes,
    random_crop,
    random_flip,
    resized_crop,
)
from lab.augment.erase import random_erase
from lab.augment.mix import mix
from lab.augment.policies import auto_augment, rand_augment


@dataclass(frozen=True)
class Augmentation:
    """Augmentation settings, in the order in which they apply; the default does nothing.

    Args:
        resized: random resized crop, with 8% to 100% of the area.
        padding: pixels added on each side before a random crop.
        reflect: pad with the image reflected at its edge instead of zeros.
        flip: flip horizontally with probability 1/2.
        alternate: flip a random half in the first epoch, then alternate between the halves; done by
            `Batches`, which knows the epoch.
        policy: RandAugment, or AutoAugment's policy for CIFAR-10.
        operations: number of operations of RandAugment.
        erase: probability of a box of noise, after normalisation.
        mixup: alpha of Mixup; 0 is none.
        cutmix: alpha of CutMix; 0 is none. With both, one of them is drawn for each batch.
    """

    resized: bool = False
    padding: int = 0
    reflect: bool = False
    flip: bool = False
    alternate: bool = False
    policy: Literal["none", "rand", "auto"] = "none"
    operations: int = 2
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def crop(self, images: list[Tensor], size: int, generator: torch.Generator) -> Tensor:
        """A batch from photographs of different sizes: resized crops, or centre crops.

        Shapes: uint8 [3, H, W] each -> [B, 3, size, size].
        """
        if not self.resized:
            return torch.stack([centre_crop(image, size) for image in images])
        sizes = torch.tensor([image.shape[1:] for image in images])
        return resized_crop(images, random_boxes(sizes, generator), size)

    def on_bytes(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Apply padded crop, flip and policy. Shapes: uint8 [B, 3, H, W] -> the same."""
        if self.padding:
            images = random_crop(images, self.padding, generator, reflect=self.reflect)
        if self.flip:
            images = random_flip(images, generator)
        if self.policy == "rand":
            images = rand_augment(images, generator, operations=self.operations)
        elif self.policy == "auto":
            images = auto_augment(images, generator)
        return images

    def on_floats(
        self, images: Tensor, labels: Tensor, classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Apply erasing and mixing to normalised images.

        Shapes: [B, 3, H, W], [B] -> [B, 3, H, W], and [B] or, if mixed, [B, classes].
        """
        if self.erase:
            images = random_erase(images, self.erase, generator)
        if self.mixup or self.cutmix:
            return mix(
                images,
                labels,
                classes,
                generator,
                mixup_alpha=self.mixup,
                cutmix_alpha=self.cutmix,
            )
        return images, labels


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    # ResNet on CIFAR (He et al., 2016).
    "crop-flip": Augmentation(padding=4, flip=True),
    # Speedruns on CIFAR (Jordan, 2024).
    "translate-alternate": Augmentation(padding=2, reflect=True, alternate=True),
    # ViT on CIFAR (github.com/omihub777/ViT-CIFAR).
    "vit": Augmentation(padding=4, flip=True, policy="auto"),
    # ResNet-50 on Tiny-ImageNet (He et al., 2016, as in later implementations).
    "resized-flip": Augmentation(resized=True, flip=True),
    # ConvNeXt (Liu et al., 2022), without mixing, and with more (paper, App. E).
    "convnext": Augmentation(
        resized=True, flip=True, policy="rand", erase=0.25, mixup=0.8, cutmix=1.0
    ),
    "convnext-no-mix": Augmentation(resized=True, flip=True, policy="rand", erase=0.25),
    "convnext-more": Augmentation(
        resized=True, flip=True, policy="rand", operations=3, erase=0.25, mixup=1.0, cutmix=1.2
    ),
}
