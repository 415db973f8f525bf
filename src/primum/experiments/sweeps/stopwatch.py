"""Time of the steps alone: without evaluation, and without steps that are watched."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter, process_time
from typing import Any

import torch


class Stopwatch:
    """Runs while steps are taken as the arm takes them; `seconds` counts the others as equal.

    On a CPU with one thread it counts the process's own time, which other work on the machine does
    not lengthen. A GPU is waited for whenever the watch starts or stops.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = (
            process_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
        )
        self._begin: float | None = None
        self._elapsed = 0.0
        self._timed = 0
        self._steps = 0

    def start(self) -> None:
        """Before a step that counts; no effect while running."""
        if self._begin is None:
            self._begin = self._now()

    def stop(self) -> None:
        """Before anything that does not count."""
        if self._begin is not None:
            self._elapsed += self._now() - self._begin
            self._begin = None

    def count(self) -> None:
        """A step was taken."""
        self._steps += 1
        self._timed += self._begin is not None

    @property
    def seconds_per_step(self) -> float:
        """Mean over the timed steps; not a number before there are any."""
        running = 0.0 if self._begin is None else self._now() - self._begin
        return (self._elapsed + running) / self._timed if self._timed else float("nan")

    @property
    def seconds(self) -> float:
        """Of all steps so far, those that were not timed taken as long as the others."""
        return self.seconds_per_step * self._steps

    def state_dict(self) -> dict[str, Any]:
        """Plain values; a running watch is read, not stopped."""
        running = 0.0 if self._begin is None else self._now() - self._begin
        return {"elapsed": self._elapsed + running, "timed": self._timed, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, stopped."""
        self._begin = None
        self._elapsed, self._timed, self._steps = (
            state[name] for name in ("elapsed", "timed", "steps")
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
