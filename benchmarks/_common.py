"""What the benchmarks share: turns, ratios, options, and the report with the machine's record."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import primum
from primum.experiments.files import write_text
from primum.experiments.runs import processor
from primum.experiments.text_tables import markdown_table, text_table

RESULTS = Path(__file__).resolve().parent / "results"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # head, rows


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
    words = list(sys.argv[1:] if argv is None else argv)
    words = [re.sub(r"[^=]*/", "", word) for word in words]  # paths by their last part
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *words]),
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
    """Add the time taken."""
    record |= {"load_at_end": _load(), "seconds": round(seconds, 1)}


class Report:
    """What a benchmark found, with the machine and the time since this was made.

    Args:
        script: The benchmark's file name.
        argv: Its command line; None for that of the process.
        out: The JSON file; the Markdown file goes beside it.
        more: For the record of the machine.

    Attributes:
        record: Command, date, versions, machine; after `save`, the time taken.
    """

    def __init__(self, script: str, argv: Sequence[str] | None, out: Path, **more: Any) -> None:
        self.out = out
        self.record = environment(script, argv) | more
        self._begin = perf_counter()
        self._parts: tuple[Table | Sequence[str] | str, ...] = ()

    @property
    def seconds(self) -> float:
        """Since the report was made."""
        return perf_counter() - self._begin

    def save(
        self,
        content: Mapping[str, Any],
        *parts: Table | Sequence[str] | str,
        pictures: Sequence[Path] = (),
    ) -> None:
        """Write what there is so far: `content` as JSON, the parts as Markdown.

        Parts are tables, lists of lines and paragraphs; the pictures come below them.
        """
        finish(self.record, self.seconds)
        write_json(self.out, {"environment": self.record, **content})
        self._parts = parts
        page = [_markdown(part) for part in parts]
        page += [f"![{path.stem}]({path.name}.svg)" for path in pictures]
        page.append(f"`{self.record['command']}`: {describe(self.record)}.")
        write_text(self.out.with_suffix(".md"), "\n\n".join(page) + "\n")

    def show(self) -> None:
        """Print what was saved last, and where."""
        shown = [_text(part) for part in self._parts]
        print(*shown, describe(self.record), sep="\n\n")
        print(f"Written: {os.path.relpath(self.out)} and its .md")


def _markdown(part: Table | Sequence[str] | str) -> str:
    if isinstance(part, str):
        return part
    return markdown_table(*part) if _is_table(part) else "\n".join(f"- {line}" for line in part)


def _text(part: Table | Sequence[str] | str) -> str:
    if isinstance(part, str):
        return part
    return as_text(*part) if _is_table(part) else "\n".join(part)


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    return text_table([head, *rows], left=None, rule=True)


def _is_table(part: Table | Sequence[str]) -> bool:
    return bool(part) and not isinstance(part[0], str)


def parse_quick(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """Options of a command line; those not given are of `quick` with --quick, else of `full`."""
    parser.set_defaults(**full)
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(argv)
    return options


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
