"""Runs that are trained by several processes together, each with its share of every batch."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from primum.experiments.train import Run, Settings, train


class Team:
    """`ranks` processes in one gloo group. All make the same runs; the first hands them over."""

    def __init__(self, ranks: int, folder: Path) -> None:
        spawn = get_context("spawn")
        self._tasks: list[Queue[Any]] = [spawn.Queue() for _ in range(ranks)]
        self._done: Queue[Any] = spawn.Queue()
        self._processes: list[BaseProcess] = [
            spawn.Process(
                target=_work, args=(rank, ranks, folder, tasks, self._done), name=f"rank {rank}"
            )
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def train_all(self, settings: Sequence[Settings]) -> Iterator[Run]:
        """The runs, one after the other."""
        for each in settings:
            for tasks in self._tasks:
                tasks.put(each)
            yield self._result()

    def _result(self) -> Run:
        while True:
            try:
                result = self._done.get(timeout=1)
            except Empty:
                dead = [p.name for p in self._processes if not p.is_alive()]
                if dead:
                    raise RuntimeError(f"{', '.join(dead)} ended in the middle of a run") from None
                continue
            if isinstance(result, BaseException):
                raise result
            assert isinstance(result, Run)
            return result

    def dismiss(self) -> None:
        """Let the processes end by themselves."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join()

    def stop(self) -> None:
        """End them, in whatever they are."""
        for process in self._processes:
            process.terminate()


@contextmanager
def team_of(ranks: int) -> Iterator[Team]:
    """A team for the length of a block; on an error its processes are ended."""
    with tempfile.TemporaryDirectory() as folder:
        # Processes inherit what their parent ignores: Ctrl-C is the parent's alone to answer.
        answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
        team = Team(ranks, Path(folder))
        signal.signal(signal.SIGINT, answer)
        try:
            yield team
        except BaseException:
            team.stop()
            raise
        team.dismiss()


def _work(rank: int, ranks: int, folder: Path, tasks: Queue[Any], done: Queue[Any]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        for settings in iter(tasks.get, None):
            run = train(settings, rank, ranks)
            if rank == 0:
                done.put(run)
    except Exception as error:
        done.put(error)
        raise
    finally:
        dist.destroy_process_group()
