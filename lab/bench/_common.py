"""Shared by the benchmarks: interleaved timing, ratios, command lines, and reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import primum
from lab.files import write_text
from lab.runs import processor
from lab.stopwatch import use_threads as use_threads
from lab.text_tables import markdown_table, text_table

RESULTS = Path(__file__).resolve().parent / "results"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # head, rows
Part = Table | Sequence[str] | str


def take_turns(
    arms: Sequence[Callable[[], object]],
    seconds: float,
    most: int,
    least: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> list[list[float]]:
    """Seconds per call of each arm; arms are interleaved, in alternating order, round by round.

    So noise of the machine affects all arms equally. Stops before the first round that would
    probably exceed `seconds`, after at least `least` and at most `most` rounds.
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
    """Process time for one thread, which other processes hardly affect; wall time for more.

    On an idle machine both are the same for one thread.
    """
    return process_time if threads == 1 else perf_counter


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of medians of paired times, with a 95% bootstrap interval over the pairs."""
    pairs = torch.tensor([above, below], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    count = pairs.shape[1]
    draws = torch.randint(count, (2000, count), generator=generator)
    over, under = pairs[:, draws].quantile(0.5, dim=2)
    low, high = (over / under).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return median(above) / median(below), low, high


def count_flops() -> FlopCounterMode:
    """A counter that includes in-place matrix products, which torch's own table leaves out."""

    def inplace(_: Any, one: Any, other: Any, **__: Any) -> int:
        return 2 * one[0] * one[1] * other[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: inplace})


def _environment(script: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Command, versions and machine; written into every result file."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = [re.sub(r"[^=]*/", "", word) for word in words]  # paths by their last part
    return {
        "command": " ".join(["python", "-m", f"lab.bench.{Path(script).stem}", *words]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "primum": primum.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "process time" if torch.get_num_threads() == 1 else "wall time",
        "load_at_start": _load(),
    }


def describe(record: Mapping[str, Any]) -> str:
    """One line about versions and machine, to put below a table."""
    return (
        f"{record['cpu']}, {record['cpus']} cores, "
        f"{record['threads']} used, {record['clock']}, "
        f"torch {record['torch']}, Python {record['python']}, primum {record['primum']}, "
        f"{record['date'][:10]}; load {record['load_at_start']} at the start"
        + (f", {record['load_at_end']} at the end" if "load_at_end" in record else "")
    )


class Report:
    """Results of a benchmark with a record of how they were obtained, as JSON and Markdown.

    The clock starts when the report is created.

    Args:
        script: File name of the benchmark.
        argv: Its command line; None for that of the process.
        out: The JSON file; the Markdown file is written next to it.
        more: Further entries of the record.

    Attributes:
        record: Command, date, versions, machine; after `finish`, also the time taken.
    """

    def __init__(self, script: str, argv: Sequence[str] | None, out: Path, **more: Any) -> None:
        self.out = out
        self.record = _environment(script, argv) | more
        self._begin = perf_counter()
        self._parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds since the report was created."""
        return perf_counter() - self._begin

    def finish(self) -> dict[str, Any]:
        """The record, with the time taken so far."""
        self.record |= {"load_at_end": _load(), "seconds": round(self.seconds, 1)}
        return self.record

    def save(
        self, content: Mapping[str, Any], *parts: Part, record: Mapping[str, Any] | None = None
    ) -> None:
        """Write the results so far with the record, to the JSON file and below the parts.

        `record` is that of an earlier run, whose stored results are only shown again.
        """
        record = record or self.finish()
        line = f"`{record['command']}`: {describe(record)}."
        self.write({"environment": record, **content}, *parts, line)

    def write(self, content: Mapping[str, Any], *parts: Part) -> None:
        """Write `content` as JSON and, if there are any, the parts as Markdown.

        Parts are tables, lists of lines and paragraphs.
        """
        write_text(self.out, json.dumps(content, indent=1) + "\n")
        self._parts = parts
        if parts:
            page = "\n\n".join(_markdown(part) for part in parts)
            write_text(self.out.with_suffix(".md"), page + "\n")

    def show(self) -> None:
        """Print the parts written last, and where the files are."""
        print(*(_text(part) for part in self._parts), sep="\n\n")
        print(f"\nWritten: {os.path.relpath(self.out)} and its .md")


def _markdown(part: Part) -> str:
    if isinstance(part, str):
        return part
    return markdown_table(*part) if _is_table(part) else "\n".join(f"- {line}" for line in part)


def _text(part: Part) -> str:
    if isinstance(part, str):
        return part
    return as_text(*part) if _is_table(part) else "\n".join(map(str, part))


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    return text_table([head, *rows], left=None, rule=True)


def _is_table(part: Table | Sequence[str]) -> bool:
    return bool(part) and not isinstance(part[0], str)


def make_parser(
    script: str, description: str | None, quick: str | None = None
) -> argparse.ArgumentParser:
    """A parser with --out and, if there is a quick version to describe, --quick."""
    parser = argparse.ArgumentParser(
        prog=script,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = (RESULTS / script).with_suffix(".json")
    about = f"JSON file; Markdown is written next to it (default: lab/bench/results/{out.name})"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=about)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def parse_quick(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """Parsed options, with defaults from `quick` if --quick is given, else from `full`."""
    parser.set_defaults(**full)
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(argv)
    return options


def _load() -> float | None:
    """Load average over the last minute, this process included; None where unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def positive(text: str) -> int:
    """An integer above 0, as a type for argparse."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be an integer above 0, got {text!r}")
    return int(text)
