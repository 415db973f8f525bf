"""Augmentations on batches of image tensors, drawn from an explicit generator.

crops.py      random crop, flip, resized crop, centre crop
pixels.py     colour operations on bytes, as Pillow defines them
warps.py      shear, translation, rotation
policies.py   RandAugment, and AutoAugment's policy for CIFAR-10
erase.py      random erasing
mix.py        Mixup, CutMix, soft targets
presets.py    the augmentations of each recipe of the paper, applied to a batch

Everything runs on the CPU, optionally in workers; the same generator state gives the same batch.
"""

from lab.augment.presets import AUGMENTATIONS, Augmentation

__all__ = ["AUGMENTATIONS", "Augmentation"]
