"""Runs over several processes that `torchrun` started: each has a part of every batch.

All of them go through the same sweep in step; the first one writes and talks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primum.experiments.sweeps.arms import ArmError
from primum.experiments.sweeps.settings import RunSettings, SettingsError


@dataclass(frozen=True)
class Ranks:
    """Which process this is, of how many."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This process's own device of a kind."""
        if self.size > 1 and name == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device(name)

    def mean(self, value: Tensor) -> Tensor:
        """Over all processes."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def all_of(self, value: Any) -> list[Any]:
        """Everybody's, in the order of ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def check(self, settings: RunSettings) -> None:
        """Refuse what cannot be shared."""
        if self.size == 1:
            return
        if settings.batch_size % self.size:
            raise SettingsError(
                f"batch_size must be a multiple of the {self.size} ranks, got {settings.batch_size}"
            )
        if settings.arm.name == "loss-weighted":
            raise ArmError("loss-weighted ranks the losses of one process; run it without torchrun")


def current() -> Ranks:
    """The process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


def check_device(name: str) -> None:
    """Refuse a device that does not exist or does not work, by the first number on it."""
    own = os.environ.get("LOCAL_RANK")
    try:
        torch.zeros((), device=f"cuda:{own}" if name == "cuda" and own else name).item()
    except Exception as error:  # of many kinds: each back end has its own
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise SettingsError(
            f"device {name!r} cannot be used here: {reason}; choose another, cpu for one"
        ) from error


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the others, if `torchrun` started several."""
    check_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield current()
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield current()
    finally:
        dist.destroy_process_group()
