"""From settings to files: run.json after every look, the page and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from primum.experiments.images import load_data
from primum.experiments.inspection.session import Inspection
from primum.experiments.inspection.settings import InspectSettings
from primum.experiments.report import render_runs
from primum.experiments.runs import RunRecord, write_run, write_whole

TITLE = "What does a step do to its samples?"
HEAD = ("at", "weights", "removed %", "really %", "harmed %", "really %", "sign right %")
COLUMNS = ("reor", "reor_real", "harmed", "harmed_real", "sign_right")


def run_inspection(
    settings: InspectSettings,
    out: Path,
    *,
    checkpoints: Sequence[Path] = (),
    command: str = "",
    threads: int | None = None,
) -> int:
    """Inspect, write `run.json` and `report.html` into `out`, print a table; the exit code.

    What is finished is on disk at any time; Ctrl-C writes the page of it.
    """
    with _threads(threads):
        data = load_data(settings.data)
        looks = len(checkpoints) or 1 + -(-settings.train_steps // settings.every)
        total = settings.train_steps + looks * settings.batches
        with tqdm(
            total=total, desc="inspecting", unit="step", disable=not sys.stderr.isatty()
        ) as bar:
            inspection = Inspection(settings, data, command=command, after_step=bar.update)
            work = inspection.load(checkpoints) if checkpoints else inspection.train()
            stopped = False
            try:
                for _ in work:
                    write_run(inspection.record(), out / "run.json")
            except KeyboardInterrupt:
                stopped = True
    if not inspection.moments:
        print("\nStopped by Ctrl-C before the first look. Nothing was written.", file=sys.stderr)
        return 130
    record = inspection.record()
    write_run(record, out / "run.json")
    write_whole(out / "report.html", render_runs([record], title=TITLE))
    print(text_table(record))
    print(f"\nReport: {out / 'report.html'}; numbers: {out / 'run.json'}")
    if stopped:
        print("Stopped by Ctrl-C; what was finished is kept.", file=sys.stderr)
    return 130 if stopped else 0


def text_table(record: RunRecord) -> str:
    """One line per look and weighting, means over the batches of the look."""
    lines = [list(HEAD)]
    for label in dict.fromkeys(moment["label"] for moment in record.moments):
        moments = [moment for moment in record.moments if moment["label"] == label]
        for row, name in enumerate(moments[0]["table"]["weights"]):
            cells = []
            for column in COLUMNS:
                values = [moment["table"][column][row] for moment in moments]
                known = [value for value in values if value == value]
                cells.append(f"{100 * fmean(known):.0f}" if known else "–")
            lines.append([label if row == 0 else "", name, *cells])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
