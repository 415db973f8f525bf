"""What the commands on sweeps have in common: run, tell, write, and fail in plain words."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from primum.experiments.extras import refuse
from primum.experiments.images import DataError
from primum.experiments.models import ModelError
from primum.experiments.report import render_runs
from primum.experiments.results import environment
from primum.experiments.runs import RunError, RunRecord
from primum.experiments.sweeps.arms import Arm, ArmError
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.plan import plan
from primum.experiments.sweeps.progress import Progress
from primum.experiments.sweeps.ranks import Ranks, joined
from primum.experiments.sweeps.settings import RunSettings, SettingsError
from primum.experiments.sweeps.store import Store, write_safely
from primum.experiments.sweeps.summary import SettingSummary, as_json, summarise
from primum.experiments.sweeps.sweep import OnRun, SweepError, nothing, run_sweep
from primum.experiments.sweeps.table import NOTE, markdown, text_table

# What a user can do something about; anything else is a bug and shows its trace.
PLAIN = (ArmError, DataError, ModelError, RunError, SettingsError, SweepError, OSError)


def guarded(name: str, out: Path, work: Callable[[], int]) -> int:
    """The exit code: 1 with a message for what a user can mend, 130 for Ctrl-C."""
    try:
        return work()
    except KeyboardInterrupt:
        print(
            f"\nStopped. Finished runs are in {out}; the same command goes on from here.",
            file=sys.stderr,
        )
        return 130
    except PLAIN as error:
        print(f"primum {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        return refuse(f"primum {name}", error)


def place_of(arguments: argparse.Namespace, command: str) -> Place:
    """Where a sweep takes place."""
    leasts = {"seeds": 1, "first_seed": 0, "workers": 1, "threads": 1, "data_workers": 0}
    for name, least in leasts.items():
        value = getattr(arguments, name, None)
        if value is not None and value < least:
            raise SettingsError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    return Place(
        store=Store(arguments.out),
        data_dir=arguments.data_dir,
        cache_dir=arguments.cache_dir,
        checkpoint_seconds=arguments.checkpoint_seconds,
        workers=arguments.workers,
        threads=arguments.threads,
        data_workers=arguments.data_workers,
        command=command,
        environment=_environment(arguments.workers, arguments.threads),
    )


def _environment(workers: int, threads: int) -> dict[str, str]:
    found = environment(workers)
    if threads != 1:
        del found["runs at a time, one thread each"]
        found |= {"runs at a time": str(workers), "threads each": str(threads)}
    return found


def run_comparison(
    points: Sequence[RunSettings],
    arms: Sequence[Arm],
    seeds: range,
    arguments: argparse.Namespace,
    *,
    command: str,
) -> int:
    """Make the runs, then the tables and pages."""
    place = place_of(arguments, command)
    runs = plan(points, arms, seeds)
    write = tensorboard_writer(arguments.out / "tensorboard") if arguments.tensorboard else None
    with joined(points[0].device) as ranks:
        on_run = write if write is not None and ranks.leads else nothing
        records = run_sweep(runs, place, progress_of(ranks), on_run)
    if not ranks.leads:
        return 0
    summaries = summarise(records)
    for summary in summaries:
        print(f"\n{summary.title}\n\n{text_table(summary)}")
    print(f"\n{NOTE}")
    write_pages(records, summaries, arguments.out, command, "Comparison")
    print(f"\nRuns, summary.json, summary.md and report.html are in {arguments.out}")
    return 0


def progress_of(ranks: Ranks) -> Progress:
    """One process tells, the others keep quiet."""
    return Progress() if ranks.leads else Progress(io.StringIO())


def write_pages(
    records: Sequence[RunRecord],
    summaries: Sequence[SettingSummary],
    out: Path,
    command: str,
    title: str,
) -> None:
    """summary.json, summary.md, report.html."""
    write_safely(out / "summary.json", as_json(summaries, command).encode())
    write_safely(out / "summary.md", markdown(summaries, command, title).encode())
    write_safely(out / "report.html", render_runs(records, title=title).encode())


def tensorboard_writer(folder: Path) -> OnRun:
    """What writes a run's curves into a folder of its own, whole or not at all, and once.

    Made before the first run: then it is known that TensorBoard is there.
    """
    from torch.utils.tensorboard import SummaryWriter

    def write(run: RunSettings, record: RunRecord) -> None:
        own = folder / f"{record.arm}-seed{run.seed}-{run.key}"
        if own.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".curves-", dir=folder.parent) as draft:
            with SummaryWriter(os.path.join(draft, "curves")) as writer:
                for table in (record.curves, record.steps):
                    for name, values in table.items():
                        for step, value in zip(table["step"], values, strict=True):
                            if name not in ("step", "epoch") and value is not None:
                                writer.add_scalar(name, float(value), int(step))
            os.replace(os.path.join(draft, "curves"), own)

    return write
