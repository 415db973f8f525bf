"""Batches of images whose order and augmentation depend only on seed, epoch and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.augment import Augmentation
from lab.augment.crops import mirror
from lab.epochs import AUGMENT, MIRROR, Batch, Epochs, generator_of
from lab.images.decode import LazyImages
from lab.images.load import ImageData, Split


@dataclass(eq=False)
class Batches(Epochs):
    """The batches of one split.

    Args:
        split: images and labels.
        data: the data set of the split, for its mean, deviation and classes.
        augmentation: augmentation of the images; the default does nothing.
        batch_size: this and other arguments as in `Epochs`; workers help with lazy images.

    Example:
        >>> from lab.images import Batches, DataSettings, load_data
        >>> data = load_data(DataSettings("generated", train_size=100))
        >>> batches = Batches(data.train, data, batch_size=32, seed=0)
        >>> [len(batch.ids) for batch in batches.epoch(0)]
        [32, 32, 32]
    """

    split: Split
    data: ImageData
    augmentation: Augmentation = Augmentation()  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mean, self._std = (
            255 * torch.tensor(each, dtype=torch.float32).view(-1, 1, 1)
            for each in (self.data.mean, self.data.std)
        )

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.split)

    def make(self, ids: Tensor, epoch: int, step: int) -> Batch:
        """The batch of these samples, with the augmentation of this step."""
        if isinstance(self.split.images, Tensor) and self.split.images.is_floating_point():
            return Batch(self.split.images[ids], self.split.labels[ids], ids)  # used as they are
        generator = generator_of(self.seed, AUGMENT, epoch, step, self.rank)
        images = self.augmentation.on_bytes(self._pixels(ids, generator), generator)
        if self.augmentation.alternate:
            images = mirror(images, self._mirrored(ids, epoch))
        normalised = (images.float() - self._mean) / self._std
        return Batch(
            *self.augmentation.on_floats(
                normalised, self.split.labels[ids], self.data.classes, generator
            ),
            ids,
        )

    def _mirrored(self, ids: Tensor, epoch: int) -> Tensor:
        """Which samples are mirrored: a random half in the first epoch, then alternating. [B]."""
        generator = generator_of(self.seed, MIRROR)
        first = torch.randint(2, (len(self.split),), generator=generator)
        return ((first[ids] + epoch) % 2).bool()

    def _pixels(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Stored images at one size. uint8 [B, 3, H, W]."""
        images = self.split.images
        if isinstance(images, LazyImages):
            photographs = [images.read(index) for index in ids.tolist()]
            return self.augmentation.crop(photographs, images.size, generator)
        if self.augmentation.resized:
            return self.augmentation.crop(list(images[ids]), images.shape[-1], generator)
        return images[ids]


def first_images(data: ImageData, count: int = 5000) -> Tensor:
    """The first training images, normalised but not augmented. [N, 3, H, W]."""
    batches = Batches(data.train, data, batch_size=1)
    return batches.make(torch.arange(min(count, len(data.train))), 0, 0).inputs
