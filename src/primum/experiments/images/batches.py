"""Batches whose order and augmentation depend on seed, epoch and step alone.

A run that resumes in the middle of an epoch sees exactly the batches it would have seen, whatever
the number of workers; only the numbers of epoch and step have to be stored.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from multiprocessing import get_all_start_methods
from threading import Thread
from time import sleep
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from primum.experiments.augment import Augmentation
from primum.experiments.augment.crops import mirror
from primum.experiments.images.lazy import LazyImages
from primum.experiments.images.load import ImageData, Split
from primum.experiments.images.sources import DataError

ORDER, AUGMENT, MIRROR = 1, 2, 4  # purposes of the generators, which keep them apart; 3 is taken
LOOK_UP = 0.5  # seconds between a worker's checks for its parent


class Batch(NamedTuple):
    """Images float [B, 3, H, W], normalised; labels [B] or soft targets [B, classes]; ids [B].

    An id is a sample's place in its split.
    """

    images: Tensor
    targets: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(each.to(device, non_blocking=True) for each in self))


class Batches:
    """The batches of one split.

    Args:
        split: images and labels.
        data: what the split is part of; its mean, deviation and classes are used.
        batch_size: samples of a step, over all ranks.
        seed: of the order and the augmentations.
        augmentation: what is done to the images; None is nothing.
        shuffle: a new order in each epoch; otherwise the split's own.
        drop_last: leave out a last batch that is not full.
        stream: draw all epochs' orders from one generator, as `primum demo` always did, instead of
            one generator per epoch.
        workers: processes that prepare batches, which changes no bit of them; worth it for lazy
            images. They end with the epoch, or when its batches are closed or let go.
        rank: which part of each batch this process takes, of `ranks`.
        ranks: number of processes that share a batch.

    Example:
        >>> from primum.experiments.images import Batches, DataSettings, load_data
        >>> data = load_data(DataSettings("generated", train_size=100))
        >>> batches = Batches(data.train, data, batch_size=32, seed=0)
        >>> [len(batch.ids) for batch in batches.epoch(0)]
        [32, 32, 32]
    """

    def __init__(
        self,
        split: Split,
        data: ImageData,
        *,
        batch_size: int,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        stream: bool = False,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if batch_size < ranks:
            raise ValueError(f"batch_size must be >= ranks ({ranks}), got {batch_size}")
        if drop_last and batch_size > len(split):
            raise ValueError(
                f"batch_size is {batch_size}, but there are {len(split)} samples; "
                "choose a smaller one, or drop_last=False"
            )
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.split = split
        self.classes = data.classes
        self.batch_size = batch_size
        self.seed = seed
        self.augmentation = augmentation or Augmentation()
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.stream = stream
        self.workers = workers
        self.rank, self.ranks = rank, ranks
        self._mean, self._std = (
            255 * torch.tensor(each, dtype=torch.float32).view(-1, 1, 1)
            for each in (data.mean, data.std)
        )

    def __len__(self) -> int:
        """Steps of an epoch."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch, from `first_step` on."""
        steps = _Steps(self, epoch, first_step)
        if self.workers == 0 or len(steps) == 0:
            return (steps[place] for place in range(len(steps)))
        return _from_workers(steps, min(self.workers, len(steps)))

    def order(self, epoch: int) -> Tensor:
        """All ids in the order of an epoch; [N]."""
        if not self.shuffle:
            return torch.arange(len(self.split))
        if not self.stream:
            return torch.randperm(len(self.split), generator=_generator(self.seed, ORDER, epoch))
        generator = torch.Generator().manual_seed(self.seed)
        orders = [torch.randperm(len(self.split), generator=generator) for _ in range(epoch + 1)]
        return orders[-1]

    def make(self, ids: Tensor, epoch: int, step: int) -> Batch:
        """One batch of the given samples, augmented as at this step."""
        if isinstance(self.split.images, Tensor) and self.split.images.is_floating_point():
            return Batch(self.split.images[ids], self.split.labels[ids], ids)  # made to be used so
        generator = _generator(self.seed, AUGMENT, epoch, step, self.rank)
        images = self.augmentation.on_bytes(self._pixels(ids, generator), generator)
        if self.augmentation.alternate:
            images = mirror(images, self._mirrored(ids, epoch))
        normalised = (images.float() - self._mean) / self._std
        return Batch(
            *self.augmentation.on_floats(
                normalised, self.split.labels[ids], self.classes, generator
            ),
            ids,
        )

    def _mirrored(self, ids: Tensor, epoch: int) -> Tensor:
        """Which samples are mirrored: a random half in the first epoch, then the other. [B]."""
        generator = _generator(self.seed, MIRROR)
        first = torch.randint(2, (len(self.split),), generator=generator)
        return ((first[ids] + epoch) % 2).bool()

    def _pixels(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Stored images in one size; uint8 [B, 3, H, W]."""
        images = self.split.images
        if isinstance(images, LazyImages):
            photographs = [images.read(index) for index in ids.tolist()]
            return self.augmentation.crop(photographs, images.size, generator)
        if self.augmentation.resized:
            return self.augmentation.crop(list(images[ids]), images.shape[-1], generator)
        return images[ids]


def first_images(data: ImageData, count: int = 5000) -> Tensor:
    """The first training images as a model sees them, without augmentation; [N, 3, H, W]."""
    batches = Batches(data.train, data, batch_size=1)
    return batches.make(torch.arange(min(count, len(data.train))), 0, 0).images


class _Steps(Dataset[Batch]):
    """The steps of one epoch, each made when asked for."""

    def __init__(self, batches: Batches, epoch: int, first_step: int) -> None:
        self.batches, self.epoch, self.first_step = batches, epoch, first_step
        self.order = batches.order(epoch)

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.first_step)

    def __getitem__(self, place: int) -> Batch:
        step, size = self.first_step + place, self.batches.batch_size
        ids = self.order[step * size : (step + 1) * size]
        return self.batches.make(ids[self.batches.rank :: self.batches.ranks], self.epoch, step)


class _ErrorsAsItems(Dataset[Batch | DataError]):
    """The same steps; a `DataError` is returned instead of raised.

    A loader would add the traceback of its process to the message.
    """

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Batch | DataError:
        try:
            return self.steps[place]
        except DataError as error:
            return error


def _from_workers(steps: _Steps, workers: int) -> Generator[Batch, None, None]:
    """Made by other processes, a few ahead; they end when this does."""
    loader = DataLoader(
        _ErrorsAsItems(steps),
        batch_size=None,
        num_workers=workers,
        # The default of a program's first process: a spawned one would spawn, which takes seconds.
        multiprocessing_context=get_all_start_methods()[0],
        worker_init_fn=_follow_parent,
        generator=torch.Generator(),  # otherwise it draws from the global one and changes dropout
    )
    for found in loader:
        if isinstance(found, DataError):
            raise found
        yield found


def _follow_parent(worker: int) -> None:
    """Exit soon after the parent process is gone; the loader's own check takes 5 seconds."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            sleep(LOOK_UP)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _generator(*numbers: int) -> torch.Generator:
    """A generator for each list of numbers, unrelated to those for others."""
    seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))
