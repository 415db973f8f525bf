"""Time of the training steps, without evaluation and without observed steps; torch's threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any

import torch


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of threads torch uses, and restore it on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stopwatch:
    """Times the steps between `start` and `stop`; other steps are assumed to take as long.

    On a CPU with one thread it uses the CPU time of the process, which other work on the machine
    affects less. It synchronises with a GPU when it starts and stops.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = process_time if alone else perf_counter
        self._begin: float | None = None
        self._elapsed = 0.0
        self._timed = 0
        self._steps = 0

    def start(self) -> None:
        """Call before a timed step; has no effect while running."""
        if self._begin is None:
            self._begin = self._now()

    def stop(self) -> None:
        """Call before anything that should not be timed."""
        self._elapsed += self._running()
        self._begin = None

    def count(self) -> None:
        """Call after every step."""
        self._steps += 1
        self._timed += self._begin is not None

    @property
    def seconds_per_step(self) -> float:
        """Mean over the timed steps; NaN before the first."""
        return (self._elapsed + self._running()) / self._timed if self._timed else float("nan")

    @property
    def seconds(self) -> float:
        """Time of all steps so far."""
        return self.seconds_per_step * self._steps

    def state_dict(self) -> dict[str, Any]:
        elapsed = self._elapsed + self._running()
        return {"elapsed": elapsed, "timed": self._timed, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin = None
        self._elapsed, self._timed, self._steps = (
            state[name] for name in ("elapsed", "timed", "steps")
        )

    def _running(self) -> float:
        return 0.0 if self._begin is None else self._now() - self._begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
