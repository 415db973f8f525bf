"""The commands `compare`, `inspect` and `report`."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from lab import options
from lab.arms import Arm
from lab.checkpoints import load_checkpoint
from lab.cli import INSPECT_SETTINGS
from lab.errors import reading
from lab.files import write_text
from lab.formatting import NOTE, arm_rows, summary_page
from lab.images import load_data
from lab.job import Place, make_record
from lab.looks import Looks
from lab.page import look_cell, render
from lab.plan import plan
from lab.progress import Progress
from lab.runs import RunRecord, environment, read_runs, write_run
from lab.settings import LookSettings, RunSettings
from lab.stopwatch import use_threads
from lab.store import Store
from lab.sweep import OnRun, run_sweep
from lab.tables import Group, group_runs, moments_by_label
from lab.text_tables import text_table
from lab.torchrun import Ranks, check_device, joined
from lab.trainer import Trainer
from lab.verdicts import headline


def place_of(arguments: argparse.Namespace, folder: Path | None = None) -> Place:
    """Where and how to run a sweep."""
    return Place(
        store=Store(folder or arguments.out),
        data_dir=arguments.data_dir,
        cache_dir=arguments.cache_dir,
        text=getattr(arguments, "text", None),
        checkpoint_seconds=arguments.checkpoint_seconds,
        workers=arguments.workers,
        threads=arguments.threads,
        data_workers=arguments.data_workers,
        command=arguments.command,
        environment=environment(arguments.workers, arguments.threads),
    )


def progress_of(ranks: Ranks) -> Progress:
    """Progress display; silent except on rank 0."""
    return Progress() if ranks.leads else Progress(io.StringIO())


def compare(arguments: argparse.Namespace) -> int:
    """Train the grid of runs, then write tables and a report."""
    place = place_of(arguments)
    points = options.points(arguments)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    runs = plan(points, options.arms(arguments), seeds)
    writer = tensorboard_writer(arguments.out / "tensorboard") if arguments.tensorboard else None
    with joined(points[0].device) as ranks:
        on_run = writer if writer is not None and ranks.leads else lambda run, record: None
        records = run_sweep(runs, place, progress_of(ranks), on_run)
    if not ranks.leads:
        return 0
    groups = group_runs(records)
    for group in groups:
        print(f"\n{group.title}\n\n{text_table(arm_rows(group))}")
    print(f"\n{NOTE}")
    write_summary(groups, records, arguments.out, arguments.command, "Comparison")
    print(f"\nRuns, summary.json, summary.md and report.html are in {arguments.out}")
    return 0


def write_summary(
    groups: Sequence[Group], records: Sequence[RunRecord], out: Path, command: str, title: str
) -> None:
    """Write summary.json, summary.md and report.html."""
    content = {
        "format": "primum-summary-2",
        "command": command,
        "settings": [group.summary() for group in groups],
    }
    write_text(out / "summary.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_text(out / "summary.md", summary_page(groups, command, title))
    write_text(out / "report.html", render(records, title=title))


def tensorboard_writer(folder: Path) -> OnRun:
    """A callback that writes each run's curves to its own folder, atomically and only once.

    Created before the first run, so that a missing package is reported at the start.
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


def report(arguments: argparse.Namespace) -> int:
    """Write the report of some runs and print their verdicts."""
    records = read_runs(arguments.runs)
    with reading(", ".join(map(str, arguments.runs))):  # `moments` and `batch` may hold anything
        page = render(records, title=arguments.title)
        lines = [f"{group.title}: {headline(group)}" for group in group_runs(records)]
    write_text(arguments.out, page)
    print("\n".join(lines))
    print(f"\n{len(records)} run(s). Report: {shlex.quote(str(arguments.out))}")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Measure a model while it trains, or at checkpoints; returns the exit code.

    `run.json` is written after every measurement, so Ctrl-C keeps finished ones.
    """
    check_device(arguments.device)
    settings = inspect_settings(arguments)
    out: Path = arguments.out
    with use_threads(arguments.threads or torch.get_num_threads()):
        made = environment()
        del made["runs at a time, one thread each"]
        made["threads"] = str(torch.get_num_threads())
        place = Place(Store(out), arguments.data_dir, command=arguments.command, environment=made)
        data = load_data(settings.data_settings(arguments.data_dir))
        looks = Looks()
        trainer = Trainer(settings, data, [looks])
        done = stopped = False
        try:
            for done in _measure(trainer, looks, arguments):
                record = replace(make_record(trainer, place), complete=done)
                write_run(record, out / "run.json")
        except KeyboardInterrupt:
            stopped = True
        finally:
            trainer.close()
    if not looks.moments or not looks.curves:
        print("\nStopped before the first measurement. Nothing was written.", file=sys.stderr)
        return 130
    record = replace(make_record(trainer, place), complete=done)
    write_run(record, out / "run.json")
    write_text(out / "report.html", render([record], title="What does a step do to its samples?"))
    print(text_table(look_rows(record), left=2))
    print(f"\nReport: {out / 'report.html'}; data: {out / 'run.json'}")
    if stopped:
        print("Stopped; finished measurements are kept.", file=sys.stderr)
    return 130 if stopped else 0


def _measure(trainer: Trainer, looks: Looks, arguments: argparse.Namespace) -> Iterator[bool]:
    """Train or load checkpoints; yields after each measurement whether it was the last."""
    if arguments.checkpoint or not arguments.train_steps:
        for number, path in enumerate(arguments.checkpoint or [None]):
            step, label = 0, "step 0"
            if path is not None:
                found, with_optimizer = load_checkpoint(path, trainer.model, trainer.optimizer)
                step = number if found is None else found
                label = path.name + ("" if with_optimizer else " (new optimizer)")
            looks.look(trainer, label, step=step, first=None if path else trainer.coming)
            yield number + 1 == len(arguments.checkpoint or [None])
        return
    quiet = not sys.stderr.isatty()
    with tqdm(total=trainer.steps, desc="inspecting", unit="step", disable=quiet) as bar:
        while not trainer.finished:
            before = len(looks.moments)
            trainer.step()
            bar.update()
            if len(looks.moments) > before:
                yield trainer.finished


def inspect_settings(arguments: argparse.Namespace) -> RunSettings:
    """The run of `inspect`."""
    return RunSettings(
        **{name: getattr(arguments, name) for name in (*INSPECT_SETTINGS, "seed")},
        steps=max(1, arguments.train_steps),
        observe_every=1,
        look=LookSettings(arguments.every, arguments.batches, arguments.radius),
        arm=Arm("primum", radius=arguments.radius) if arguments.reduce else Arm("base"),
    )


def look_rows(record: RunRecord) -> list[list[str]]:
    """One row per measurement and weighting, means over its batches; headings first."""
    columns = ("reor", "reor_real", "harmed", "harmed_real", "sign_right")
    rows = [["at", "weights", "removed %", "really %", "harmed %", "really %", "sign right %"]]
    for label, moments in moments_by_label(group_runs([record])[0]).items():
        for place, name in enumerate(moments[0]["table"]["weights"]):
            cells = [look_cell(moments, column, name) for column in columns]
            rows.append([label if place == 0 else "", name, *cells])
    return rows
