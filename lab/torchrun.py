"""Runs on several processes started by `torchrun`, each with a part of every batch.

All processes run the same sweep in lockstep; rank 0 writes files and shows progress.
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

from lab.errors import UserError
from lab.settings import RunSettings

# Arms that need a single process.
ALONE = ("loss-weighted", "damped")


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This process's device of this type."""
        if self.size > 1 and name == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device(name)

    def mean(self, value: Tensor) -> Tensor:
        """Mean over all ranks (all-reduce)."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        """Barrier."""
        if self.size > 1:
            dist.barrier()

    def check(self, settings: RunSettings) -> None:
        """Raise if the run cannot be trained on several ranks."""
        if self.size == 1:
            return
        if settings.batch_size % self.size:
            raise UserError(
                f"batch_size must be a multiple of the {self.size} ranks, got {settings.batch_size}"
            )
        if settings.arm.name in ALONE or settings.look:
            what = "inspect" if settings.look else settings.arm.label
            raise UserError(f"{what} works in a single process only; run it without torchrun")


def current() -> Ranks:
    """This process's rank in the process group, or rank 0 of 1 without a group."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


def check_device(name: str) -> None:
    """Raise if a device does not exist or does not work; tries to allocate a tensor on it."""
    own = os.environ.get("LOCAL_RANK")
    try:
        torch.zeros((), device=f"cuda:{own}" if name == "cuda" and own else name).item()
    except Exception as error:  # backends raise different types
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"device {name!r} cannot be used here: {reason}; choose another, such as cpu"
        ) from error


def computes_bf16(device: str) -> bool:
    """Whether a device has bfloat16 instructions; CPUs without them are ten times as slow in it."""
    kind = torch.device(device).type
    if kind == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the process group in a block, if `torchrun` started several processes."""
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
        dist.barrier()  # gloo may abort a rank that exits while its last operation is cleaned up
    finally:
        dist.destroy_process_group()
