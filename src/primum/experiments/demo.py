"""`primum demo`: all runs, then the step times, then table and page."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from primum.experiments import verdict
from primum.experiments.recipes import Recipe
from primum.experiments.report import render
from primum.experiments.results import Results, environment, write_json
from primum.experiments.summary import Summary, summarise, text_table
from primum.experiments.team import Team, team_of
from primum.experiments.timing import StepTime, time_steps
from primum.experiments.train import Run, Settings, train


def run_demo(
    recipes: Sequence[Recipe],
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    threads: int,
    turns: int,
    command: str,
    ranks: int = 1,
) -> Results:
    """Train everything, then time every arm in `turns` turns.

    The numbers, times apart, do not depend on `threads`, nor on `ranks` but for rounding.
    """
    start = perf_counter()
    grid = [Settings(r, arm, seed) for r in recipes for seed in seeds for arm in arms]
    how = f"{threads} at a time" if ranks == 1 else f"each by {ranks} processes together"
    print(
        f"{len(recipes)} models, {len(arms)} arms, {len(seeds)} seeds: {len(grid)} runs, {how}. "
        "Ctrl-C stops.",
        file=sys.stderr,
    )
    with (
        _one_torch_thread(),
        _workers(threads) if ranks == 1 else team_of(ranks) as pool,
        _progress(len(grid), "training", "run") as bar,
    ):
        free = [s for s in grid if s.arm != "lr-matched"]
        runs = {run.settings: run for run in _train_all(free, pool, bar)}
        factors = {
            (s.recipe, s.seed): run.mean_weight for s, run in runs.items() if s.arm == "primum"
        }
        matched = [
            replace(s, lr_factor=factors[s.recipe, s.seed]) for s in grid if s.arm == "lr-matched"
        ]
        runs |= {run.settings: run for run in _train_all(matched, pool, bar)}
    times: list[StepTime] = []
    with _one_torch_thread(), _progress(len(recipes) * len(seeds), "timing", "seed") as bar:
        for recipe in recipes:
            for seed in seeds:
                times += time_steps(recipe, arms, seed, turns=turns)
                bar.update()
    order = {(s.recipe, s.arm, s.seed): place for place, s in enumerate(grid)}
    ordered = sorted(
        runs.values(),
        key=lambda run: order[run.settings.recipe, run.settings.arm, run.settings.seed],
    )
    return Results(
        tuple(ordered), tuple(times), perf_counter() - start, command, environment(threads)
    )


def write_report(results: Results, out: Path) -> list[Summary]:
    """Write `report.html` and `results.json` into `out`."""
    summaries = [summarise(results, recipe) for recipe in results.recipes]
    out.mkdir(parents=True, exist_ok=True)
    out.joinpath("report.html").write_text(render(results, summaries), encoding="utf-8")
    write_json(results, [asdict(summary) for summary in summaries], out / "results.json")
    return summaries


def print_summary(summaries: Iterable[Summary], out: Path, seconds: float) -> None:
    """The table and the verdict, for the terminal."""
    for summary in summaries:
        print(f"\n{summary.recipe.title}; mean ± 95% interval over {len(summary.seeds)} seed(s)\n")
        print(text_table(summary))
        print("\n  " + "\n  ".join([verdict.headline(summary), *verdict.details(summary)]))
    print(f"\nDone in {seconds:.0f} s. Report: {out / 'report.html'}")


def _train_all(
    settings: Sequence[Settings], pool: ProcessPoolExecutor | Team | None, bar: tqdm[None]
) -> Iterator[Run]:
    """Runs as they finish, in the pool's processes or, without a pool, in this one."""
    finished: Iterator[Run]
    if pool is None:
        finished = (train(each) for each in settings)
    elif isinstance(pool, Team):
        finished = pool.train_all(settings)
    else:
        futures = [pool.submit(train, each) for each in settings]
        finished = (future.result() for future in as_completed(futures))
    for run in finished:
        yield run
        bar.update()


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that train; none for a count of one."""
    if count == 1:
        yield None
        return
    others = set(active_children())
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    )
    # Processes inherit what their parent ignores: Ctrl-C is the parent's alone to answer.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(count):
        pool.submit(os.getpid)  # starts a process
    signal.signal(signal.SIGINT, answer)
    try:
        yield pool
    except BaseException:  # an error or Ctrl-C: do not wait for the runs under way
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """These models are too small for more, and one thread makes the sums the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _progress(total: int, what: str, unit: str) -> tqdm[None]:
    """A bar on a terminal, nothing in a log."""
    return tqdm(total=total, desc=what, unit=unit, disable=not sys.stderr.isatty(), smoothing=0.1)
