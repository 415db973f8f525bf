"""All runs of a plan, several at a time: finished ones are skipped, cut ones are taken up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from queue import Empty
from threading import Thread
from time import monotonic, sleep
from typing import Any

from primum.experiments.runs import RunRecord
from primum.experiments.sweeps.check import check_runs
from primum.experiments.sweeps.job import Place, run_job
from primum.experiments.sweeps.plan import matched
from primum.experiments.sweeps.progress import Progress
from primum.experiments.sweeps.ranks import current
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.training import Matched

TELL_EVERY = 0.5  # seconds from one word of a worker to the next

OnRun = Callable[[RunSettings, RunRecord], object]


class SweepError(RuntimeError):
    """A sweep that cannot go on, with what to do about it."""


def nothing(run: RunSettings, record: RunRecord) -> None:
    """What is done with a run, if nothing else is said."""


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(workers: int, threads: int = 1, data_workers: int = 0) -> None:
    """Refuse what would only make every run slower."""
    have = cores()
    if workers * threads > max(have, threads):
        each = "" if threads == 1 else f" of {threads} threads"
        raise SweepError(
            f"{workers} workers{each} were asked for, but there are {have} cores; "
            f"choose at most {max(1, have // threads)}"
        )
    if workers * data_workers > have:
        runs = "" if workers == 1 else f" for each of {workers} workers"
        raise SweepError(
            f"{data_workers} data workers{runs} were asked for, but there are {have} cores; "
            f"choose at most {have // workers}"
        )


def run_sweep(
    runs: Sequence[RunSettings],
    place: Place,
    progress: Progress,
    on_run: OnRun = nothing,
) -> list[RunRecord]:
    """Make what is missing; returns all runs in the order of the plan.

    The first error stops the sweep; what is finished stays. Ctrl-C likewise. `on_run` is called
    in this process with each run: at once, or when it is finished.
    """
    ranks = current()
    if ranks.size > 1 and place.workers > 1:
        raise SweepError("under torchrun all processes share each run; leave --workers at 1")
    check_workers(place.workers, place.threads, place.data_workers)
    place.store.prepare()
    done = {run.key: record for run in runs if (record := place.store.find(run)) is not None}
    ranks.wait()  # before the first of them writes
    for run in runs:
        if run.key in done and ranks.leads:  # killed between writing the run and this
            place.store.checkpoint_path(run).unlink(missing_ok=True)
    todo = [run for run in runs if run.key not in done]
    check_runs(todo)
    for run in runs:
        if run.key in done:
            on_run(run, done[run.key])
    progress.begin(todo, skipped=len(done))
    make = _in_turn if place.workers == 1 else _in_workers
    for run, record in make(todo, place, progress):
        done[run.key] = record
        on_run(run, record)
        progress.finish(run, record)
    progress.end()
    return [done[run.key] for run in runs]


def _in_turn(
    todo: Sequence[RunSettings], place: Place, progress: Progress
) -> Iterator[tuple[RunSettings, RunRecord]]:
    """In this process, in the order of the plan: what a run needs comes before it."""
    for run in todo:
        yield run, run_job(run, _taken(run, place), place, progress.of(run))


def _in_workers(
    todo: Sequence[RunSettings], place: Place, progress: Progress
) -> Iterator[tuple[RunSettings, RunRecord]]:
    """In several processes; a run waits until those it needs are finished."""
    waiting = list(todo)
    running: dict[Future[RunRecord], RunSettings] = {}
    with _pool(place.workers) as (pool, words):
        while waiting or running:
            for run in list(waiting):
                if len(running) >= place.workers:
                    break
                taken = matched(run, place.store.find)
                if taken is not None:
                    waiting.remove(run)
                    running[pool.submit(_work, run, taken, place)] = run
            finished, _ = wait(running, timeout=TELL_EVERY, return_when=FIRST_COMPLETED)
            for key, steps in _heard(words):
                progress.hear(key, *steps)
            for future in finished:
                run = running.pop(future)
                try:
                    yield run, future.result()
                except BrokenProcessPool as error:
                    raise SweepError(
                        "a worker was ended from outside, perhaps for want of memory; finished "
                        "runs are kept: give the same command again, with fewer --workers"
                    ) from error


def _taken(run: RunSettings, place: Place) -> Matched:
    taken = matched(run, place.store.find)
    if taken is None:
        raise SweepError(f"{run.arm.label}, seed {run.seed}: the runs it is matched to are missing")
    return taken


_WORDS: Any = None  # in a worker: where to send words on progress


def _start_worker(words: Any, parent: int) -> None:
    global _WORDS
    _WORDS = words
    Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """End with the process that started this one: killed, it cannot say goodbye.

    Files are whole at any moment, and whoever takes the sweep up makes these runs again.
    """
    while os.getppid() == parent:
        sleep(TELL_EVERY)
    os._exit(1)


def _work(run: RunSettings, taken: Matched, place: Place) -> RunRecord:
    last = 0.0

    def tell(done: int, steps: int) -> None:
        nonlocal last
        if monotonic() - last >= TELL_EVERY:
            last = monotonic()
            _WORDS.put((run.key, (done, steps)))

    return run_job(run, taken, place, tell)


def _heard(words: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    while True:
        try:
            yield words.get_nowait()
        except Empty:
            return


@contextmanager
def _pool(count: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    others = set(active_children())
    spawn = get_context("spawn")
    words = spawn.Queue()
    pool = ProcessPoolExecutor(
        count, mp_context=spawn, initializer=_start_worker, initargs=(words, os.getpid())
    )
    # Processes inherit what their parent ignores: Ctrl-C is the parent's alone to answer.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(count):
        pool.submit(os.getpid)  # starts a process
    signal.signal(signal.SIGINT, answer)
    try:
        yield pool, words
    except BaseException:  # an error or Ctrl-C: do not wait for the runs under way
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        words.close()
        words.cancel_join_thread()
