"""What a sweep tells while it runs: a bar on a terminal, a line per run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from tqdm import tqdm

from primum.experiments.runs import RunRecord
from primum.experiments.sweeps.settings import RunSettings


class Progress:
    """Counts runs in parts of one; time left is by what was done since the start."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._total = self._finished = 0
        self._parts: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._since = monotonic()

    def begin(self, todo: Sequence[RunSettings], skipped: int) -> None:
        """Before the first run."""
        self._total, self._since = len(todo), monotonic()
        if skipped:
            self._say(f"{skipped} run(s) finished before; they are kept.")
        if not todo:
            return
        self._say(f"{len(todo)} run(s) to make. Ctrl-C stops; the same command goes on.")
        if self._stream.isatty():
            form = "{desc}: {percentage:3.0f}%|{bar}| {postfix[0]}"
            self._bar = tqdm(
                total=1.0, desc="runs", file=self._stream, bar_format=form, postfix=[""]
            )

    def of(self, run: RunSettings) -> Callable[[int, int], None]:
        """To be called after each step of a run in this process."""
        last = 0.0

        def tell(done: int, steps: int) -> None:
            nonlocal last
            if monotonic() - last >= 0.5:
                last = monotonic()
                self.hear(run.key, done, steps)

        return tell

    def hear(self, key: str, done: int, steps: int) -> None:
        """A run has come to a step."""
        self._parts[key] = done / max(1, steps)
        self._first.setdefault(key, self._parts[key])
        self._draw()

    def finish(self, run: RunSettings, record: RunRecord) -> None:
        """A run is finished."""
        self._finished += 1
        self._parts[run.key] = 1.0
        self._first.setdefault(run.key, 0.0)
        accuracy = record.final.get("test_accuracy")
        shown = "diverged" if accuracy is None else f"{100 * accuracy:.2f}%"
        line = (
            f"[{self._finished}/{self._total}] {record.name}, {record.arm}, seed {run.seed}"
            f", {shown}, {record.seconds or 0:.0f} s of training; {self._left()}"
        )
        if self._bar is None:
            self._say(line)
        self._draw()

    def end(self) -> None:
        """After the last run."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self) -> str:
        made = sum(self._parts[key] - self._first.get(key, 0.0) for key in self._parts)
        rest = self._total - sum(self._parts.values())
        if rest <= 0:
            return "all done"
        if made <= 0:
            return "time left unknown"
        return f"about {_duration(rest * (monotonic() - self._since) / made)} left"

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.n = sum(self._parts.values()) / max(1, self._total)
            self._bar.postfix[0] = f"{self._finished} of {self._total} runs, {self._left()}"
            self._bar.refresh()

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
