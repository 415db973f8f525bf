"""Train all runs of a plan in parallel; finished runs are skipped, unfinished ones resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context
from queue import Empty
from time import monotonic
from typing import Any

from lab.epochs import exit_with_parent
from lab.errors import UserError
from lab.job import OnStep, Place, train_run
from lab.plan import check_runs, matched
from lab.progress import Progress
from lab.runs import RunRecord
from lab.settings import Matched, RunSettings
from lab.store import Store
from lab.torchrun import computes_bf16, current

UPDATE_EVERY = 0.5  # seconds between two progress updates of a run

SLOW = "This processor has no bfloat16 instructions: bf16 is about ten times as slow as fp32."

OnRun = Callable[[RunSettings, RunRecord], object]


def run_sweep(
    runs: Sequence[RunSettings],
    place: Place,
    progress: Progress,
    on_run: OnRun = lambda run, record: None,
) -> list[RunRecord]:
    """Train the missing runs; returns all runs in the order of the plan.

    The first error, or Ctrl-C, stops the sweep; finished runs are kept. `on_run` is called in the
    main process with each finished run.
    """
    ranks = current()
    if ranks.size > 1 and place.workers > 1:
        raise UserError("under torchrun all processes train the same run; leave --workers at 1")
    check_workers(place.workers, place.threads, place.data_workers)
    place.store.prepare()
    done = {run.key: record for run in runs if (record := place.store.find(run)) is not None}
    ranks.wait()  # before any of them writes
    for run in runs:
        if run.key in done and ranks.leads:  # killed before it was removed
            place.store.checkpoint_path(run).unlink(missing_ok=True)
    todo = [run for run in runs if run.key not in done]
    check_runs(todo)
    for run in runs:
        if run.key in done:
            on_run(run, done[run.key])
    if any(run.precision == "bf16" and not computes_bf16(run.device) for run in todo):
        progress.say(SLOW)
    progress.begin(len(todo), skipped=len(done))
    train = _in_turn if place.workers == 1 else _in_workers
    for run, record in train(todo, place, progress):
        done[run.key] = record
        on_run(run, record)
        progress.finish(run, record)
    progress.end()
    return [done[run.key] for run in runs]


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(workers: int, threads: int = 1, data_workers: int = 0) -> None:
    """Raise if the processes would need more cores than there are."""
    have = cores()
    if workers * threads > max(have, threads):
        each = "" if threads == 1 else f" of {threads} threads"
        raise UserError(
            f"{workers} workers{each} were requested, but there are {have} cores; "
            f"choose at most {max(1, have // threads)}"
        )
    if workers * data_workers > have:
        runs = "" if workers == 1 else f" for each of {workers} workers"
        raise UserError(
            f"{data_workers} data workers{runs} were requested, but there are {have} cores; "
            f"choose at most {have // workers}"
        )


def _in_turn(
    todo: Sequence[RunSettings], place: Place, progress: Progress
) -> Iterator[tuple[RunSettings, RunRecord]]:
    """Train in this process, in the order of the plan (references before matched controls)."""
    for run in todo:
        factors = matched(run, place.store.find)
        if factors is None:
            raise UserError(
                f"{run.arm.label}, seed {run.seed}: the runs it is matched to are missing; add "
                f"{' and '.join(arm.label for arm in run.arm.needs)}"
            )

        def update(done: int, steps: int, key: str = run.key) -> None:
            progress.update(key, done, steps)

        yield run, train_run(run, factors, place, _now_and_then(update))


def _in_workers(
    todo: Sequence[RunSettings], place: Place, progress: Progress
) -> Iterator[tuple[RunSettings, RunRecord]]:
    """Train in several processes; a matched control waits for its references."""
    waiting = list(todo)
    there = replace(place, store=Store(place.store.folder))  # without the tables it has read
    running: dict[Future[RunRecord], RunSettings] = {}
    with _pool(place.workers) as (pool, updates):
        while waiting or running:
            for run in list(waiting):
                if len(running) >= place.workers:
                    break
                factors = matched(run, place.store.find)
                if factors is not None:
                    waiting.remove(run)
                    running[pool.submit(_work, run, factors, there)] = run
            finished, _ = wait(running, timeout=UPDATE_EVERY, return_when=FIRST_COMPLETED)
            while True:
                try:
                    progress.update(*updates.get_nowait())
                except Empty:
                    break
            for future in finished:
                run = running.pop(future)
                try:
                    yield run, future.result()
                except BrokenProcessPool as error:
                    raise UserError(
                        "a worker process was killed, possibly out of memory; finished runs are "
                        "kept: run the same command again with fewer --workers"
                    ) from error


_UPDATES: Any = None  # in a worker: the queue for its progress


def _start_worker(updates: Any, parent: int) -> None:
    global _UPDATES
    _UPDATES = updates
    exit_with_parent(parent)  # files on disk are complete at any time


def _work(run: RunSettings, factors: Matched, place: Place) -> RunRecord:
    def update(done: int, steps: int) -> None:
        _UPDATES.put((run.key, done, steps))

    return train_run(run, factors, place, _now_and_then(update))


def _now_and_then(update: OnStep) -> OnStep:
    """A callback that calls `update` at most every `UPDATE_EVERY` seconds."""
    last = 0.0

    def seldom(done: int, steps: int) -> None:
        nonlocal last
        if monotonic() - last >= UPDATE_EVERY:
            last = monotonic()
            update(done, steps)

    return seldom


@contextmanager
def _pool(count: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    others = set(active_children())
    spawn = get_context("spawn")
    updates = spawn.Queue()
    pool = ProcessPoolExecutor(
        count, mp_context=spawn, initializer=_start_worker, initargs=(updates, os.getpid())
    )
    # Children inherit ignored signals: only this process handles Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(count):
        pool.submit(os.getpid)  # starts a process
    signal.signal(signal.SIGINT, handler)
    try:
        yield pool, updates
    except BaseException:  # an error or Ctrl-C: do not wait for the running runs
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        updates.close()
        updates.cancel_join_thread()
