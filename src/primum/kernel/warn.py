"""Warnings that point at the user's own line, and counts that a device may hold."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Files that are not the user's: primum, torch, and code that torch.compile has written.
LIBRARIES = (
    f"{Path(__file__).parent.parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    "<eval_with_key>",
)


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost line that is neither in primum nor in torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _foreign(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"primum: {message}", category, stacklevel=level)


def _foreign(filename: str) -> bool:
    return filename.startswith(LIBRARIES) or "torchinductor" in filename


class Once:
    """Warns the first time for each kind of message."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __call__(self, kind: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(message, category)


class Count:
    """A number of steps, some of which only the device knows of.

    Attributes:
        value: A scalar tensor where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), dtype=torch.int64, device=device)
        self._known = 0
        self._arrived: Tensor | None = None

    def load(self, value: Tensor) -> None:
        self.value = value.to(self.value.device, copy=True)
        self._known = int(value)  # SYNC: once, when a run is resumed

    def add(self, more: Tensor | int) -> bool:
        """Count a step, or one if the device says so. Whether any of the latter has been seen.

        On an accelerator what has arrived in pinned memory by now is read, without waiting.
        """
        if not isinstance(more, Tensor):
            self._known += more
            self.value = self.value + more if more else self.value
            return more > 0
        self.value = self.value + more
        seen = self._read()
        return seen is not None and seen > self._known

    def _read(self) -> float | None:
        value = self.value
        if value.device.type != "cpu":
            if self._arrived is None:
                self._arrived = torch.full((), torch.nan, dtype=torch.float64, device="cpu")
                if value.is_cuda and type(value) is Tensor:
                    self._arrived = self._arrived.pin_memory()
            self._arrived.copy_(value, non_blocking=True)
            value = self._arrived
        if type(value) is not Tensor:  # a fake tensor has no value to read
            return None
        number: Any = value.tolist()  # host memory: not a sync
        return None if number != number else float(number)
