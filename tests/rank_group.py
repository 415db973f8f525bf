"""A process group for the programs that the tests start once per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_rank(
    work: Callable[[Path, int, int], None],
    folder: Path,
    rank: int,
    ranks: int,
    *,
    seconds: int = 60,
) -> None:
    """Run `work(folder, rank, ranks)` in a gloo group that meets in a file of `folder`, then exit.

    The process ends without shutting the interpreter down. DistributedDataParallel keeps gloo's
    threads alive even after the group is destroyed, and one that needs the GIL during shutdown
    aborts the process (pytorch/pytorch#190489).
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    work(folder, rank, ranks)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
