"""Progress of a sweep: a bar with the remaining time on a terminal, else one line per run."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

from tqdm import tqdm

from lab.runs import RunRecord
from lab.settings import RunSettings


class Progress:
    """Shows finished runs and fractions of running ones, and estimates the remaining time.

    Args:
        stream: Output stream; None is stderr.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._total = self._finished = 0
        self._parts: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._since = monotonic()

    def begin(self, todo: int, skipped: int) -> None:
        """Announce `todo` runs."""
        self._total, self._since = todo, monotonic()
        if skipped:
            self.say(f"{skipped} run(s) already finished; they are kept.")
        if not todo:
            return
        self.say(f"{todo} run(s) to do. Ctrl-C stops; the same command continues.")
        if self._stream.isatty():
            form = "{desc}: {percentage:3.0f}%|{bar}| {postfix[0]}"
            self._bar = tqdm(
                total=1.0, desc="runs", file=self._stream, bar_format=form, postfix=[""]
            )

    def update(self, key: str, done: int, steps: int) -> None:
        """Set the number of steps that a run has taken."""
        self._parts[key] = done / max(1, steps)
        self._first.setdefault(key, self._parts[key])
        self._draw()

    def finish(self, run: RunSettings, record: RunRecord) -> None:
        """Report a finished run."""
        self._finished += 1
        self._parts[run.key] = 1.0
        self._first.setdefault(run.key, 0.0)
        shown = _result(run, record)
        if self._bar is None:
            self.say(
                f"[{self._finished}/{self._total}] {record.name}, {record.arm}, seed {run.seed}"
                f", {shown}, {record.seconds or 0:.0f} s of training; {self._left()}"
            )
        self._draw()

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self) -> str:
        done = sum(self._parts[key] - self._first.get(key, 0.0) for key in self._parts)
        rest = self._total - sum(self._parts.values())
        if rest <= 0:
            return "all done"
        if done <= 0:
            return "time left unknown"
        return f"about {_duration(rest * (monotonic() - self._since) / done)} left"

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.n = sum(self._parts.values()) / max(1, self._total)
            self._bar.postfix[0] = f"{self._finished} of {self._total} runs, {self._left()}"
            self._bar.refresh()

    def say(self, line: str) -> None:
        """Write a separate line."""
        print(line, file=self._stream, flush=True)


def _result(run: RunSettings, record: RunRecord) -> str:
    """The metric that a run is judged by, as text."""
    loss, accuracy = record.final.get("test_loss"), record.final.get("test_accuracy")
    if run.task == "language":
        return "diverged" if loss is None else f"loss {loss:.4f}"
    return "diverged" if accuracy is None else f"{100 * accuracy:.2f}%"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
