"""Batches of images or text whose order depends only on seed, epoch and step.

A run that resumes in the middle of an epoch sees the same batches as without the interruption, with
any number of workers; a checkpoint only stores epoch and step.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from threading import Thread
from time import sleep
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lab.errors import UserError

# Purposes of the generators, which keep them apart. Only images are mirrored, and only text is
# shifted.
ORDER, AUGMENT, PERMUTE, MIRROR, SHIFT = 1, 2, 3, 4, 4
LOOK_UP = 0.5  # seconds between a worker's checks for its parent


class Batch(NamedTuple):
    """Inputs, targets and ids of some samples; an id is a sample's index in its split.

    Images: inputs float [B, 3, H, W], normalised; labels [B] or soft targets [B, classes]; ids [B].
    Text: tokens [B, T]; next tokens [B, T]; ids [B].
    """

    inputs: Tensor
    targets: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(each.to(device, non_blocking=True) for each in self))


@dataclass(kw_only=True, eq=False)
class Epochs:
    """Iterates over batches, epoch by epoch; subclasses implement `count` and `make`.

    Args:
        batch_size: samples per step, over all ranks.
        seed: seed of the order.
        shuffle: use a new order in each epoch, instead of the stored one.
        drop_last: leave out an incomplete last batch.
        stream: draw the orders of all epochs from one generator, as the demo always did,
            instead of one generator per epoch.
        workers: processes that prepare batches; they do not change them. They end with the epoch,
            or when its generator is closed or garbage-collected.
        rank: which part of each batch this process takes.
        ranks: number of processes that share a batch.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    stream: bool = False
    workers: int = 0
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.drop_last and self.batch_size > self.count:
            raise UserError(
                f"batch_size is {self.batch_size}, but there are {self.count} samples; "
                "choose a smaller one, or set drop_last=False"
            )

    @property
    def count(self) -> int:
        """Number of samples."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Steps per epoch."""
        whole, rest = divmod(self.count, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch, from `first_step` on."""
        steps = _Steps(self, epoch, first_step)
        if self.workers == 0 or len(steps) == 0:
            return (steps[place] for place in range(len(steps)))
        return _from_workers(steps, min(self.workers, len(steps)))

    def order(self, epoch: int) -> Tensor:
        """All ids in the order of this epoch. [N]."""
        if not self.shuffle:
            return torch.arange(self.count)
        if not self.stream:
            return torch.randperm(self.count, generator=generator_of(self.seed, ORDER, epoch))
        generator = torch.Generator().manual_seed(self.seed)
        orders = [torch.randperm(self.count, generator=generator) for _ in range(epoch + 1)]
        return orders[-1]

    def make(self, ids: Tensor, epoch: int, step: int) -> Batch:
        """The batch of these samples at this step."""
        raise NotImplementedError


class _Steps(Dataset[Batch]):
    """The batches of one epoch, created on access."""

    def __init__(self, batches: Epochs, epoch: int, first_step: int) -> None:
        self.batches, self.epoch, self.first_step = batches, epoch, first_step
        self.order = batches.order(epoch)

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.first_step)

    def __getitem__(self, place: int) -> Batch:
        step, size = self.first_step + place, self.batches.batch_size
        ids = self.order[step * size : (step + 1) * size]
        return self.batches.make(ids[self.batches.rank :: self.batches.ranks], self.epoch, step)


class _ErrorsAsItems(Dataset[Batch | UserError]):
    """Like `_Steps`, but returns a `UserError` instead of raising it.

    A DataLoader would add its worker's traceback to the message.
    """

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Batch | UserError:
        try:
            return self.steps[place]
        except UserError as error:
            return error


def _from_workers(steps: _Steps, workers: int) -> Generator[Batch, None, None]:
    """Batches prefetched by worker processes, which end with this generator."""
    loader = DataLoader(
        _ErrorsAsItems(steps),
        batch_size=None,
        num_workers=workers,
        # The main process's default: in a spawned process it would be spawn, which takes seconds.
        multiprocessing_context=get_all_start_methods()[0],
        worker_init_fn=_follow_parent,
        generator=torch.Generator(),  # the global one would be advanced, which changes dropout
    )
    for found in loader:
        if isinstance(found, UserError):
            raise found
        yield found


def _follow_parent(worker: int) -> None:
    exit_with_parent(os.getppid())  # soon: the loader's own check takes 5 seconds


def exit_with_parent(parent: int) -> None:
    """Exit soon after the parent process has died."""

    def watch() -> None:
        while os.getppid() == parent:
            sleep(LOOK_UP)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def generator_of(*numbers: int) -> torch.Generator:
    """A generator seeded by these numbers, independent of those for other numbers."""
    seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))
