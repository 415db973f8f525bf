"""What the benchmarks share: turns, ratios, the record of the machine, tables, files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import primum
from primum.experiments.files import write_text

RESULTS = Path(__file__).resolve().parent / "results"


def take_turns(
    arms: Sequence[Callable[[], object]],
    seconds: float,
    most: int,
    least: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> list[list[float]]:
    """Seconds per call of each arm, called in turn and in changing order, round by round.

    A slow moment of the machine strikes all arms alike. Ends before the first round that would
    probably overrun `seconds`, but not before `least` rounds, and after `most`.
    """
    times: list[list[float]] = [[] for _ in arms]
    begin = perf_counter()
    for done in range(most):
        spent = perf_counter() - begin
        if done >= least and spent * (done + 1) > seconds * done:
            break
        order = range(len(arms)) if done % 2 == 0 else range(len(arms) - 1, -1, -1)
        for arm in order:
            start = clock()
            arms[arm]()
            times[arm].append(clock() - start)
    return times


def clock_for(threads: int) -> Callable[[], float]:
    """One thread: seconds it computed, which other processes hardly disturb. More: wall time.

    On a quiet machine both are the same for one thread.
    """
    return process_time if threads == 1 else perf_counter


def median(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of medians of paired times, with a 95% bootstrap interval over the pairs."""
    pairs = torch.tensor([above, below], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    count = pairs.shape[1]
    draws = torch.randint(count, (2000, count), generator=generator)
    over, under = pairs[:, draws].quantile(0.5, dim=2)
    low, high = (over / under).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return median(above) / median(below), low, high


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run with that many threads of torch, then as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def environment(script: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Where and how a result was obtained; written into every result file."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "primum": primum.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "process time" if torch.get_num_threads() == 1 else "wall time",
        "load_at_start": _load(),
    }


def without_folders(argv: Sequence[str] | None) -> list[str]:
    """The words of the command line, with DIR for every folder."""
    words = list(sys.argv[1:] if argv is None else argv)
    for option in ("--data-dir", "--cache-dir", "--out"):
        if option in words:
            words[words.index(option) + 1] = "DIR"
    return words


def describe(record: dict[str, Any]) -> str:
    """One line about the machine, for under a table."""
    return (
        f"{record['cpu']}, {record['cpus']} cores, "
        f"{record['threads']} used, {record['clock']}, "
        f"torch {record['torch']}, Python {record['python']}, primum {record['primum']}, "
        f"{record['date'][:10]}; load {record['load_at_start']} at the start"
        + (f", {record['load_at_end']} at the end" if "load_at_end" in record else "")
    )


def finish(record: dict[str, Any], seconds: float) -> None:
    record["load_at_end"] = _load()
    record["seconds"] = round(seconds, 1)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _load() -> float | None:
    """Processes that were running, averaged over a minute; ours are among them."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def positive(text: str) -> int:
    """A whole number above 0, from the command line."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: words to the left, numbers to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    left = [not rows or not _is_number(rows[0][i]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---:" if rows and _is_number(rows[0][i]) else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def _is_number(cell: str) -> bool:
    return cell.lstrip("+->").replace(".", "", 1).replace("x", "", 1).isdigit()


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
