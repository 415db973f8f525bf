"""A number that the device has, read on the host without waiting: late, perhaps, but free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Mailbox:
    """Reads a 0-dim tensor where it is if that is the host, and from pinned memory otherwise.

    There it is copied without waiting; what is read is what has arrived by now, the last step's
    value or that of a step before.
    """

    def __init__(self) -> None:
        self._box: Tensor | None = None

    def read(self, number: Tensor) -> float | None:
        """The number, or an earlier one; None before the first has arrived."""
        if number.device.type != "cpu":
            if self._box is None:
                self._box = torch.full((), torch.nan, dtype=torch.float64)
                if number.is_cuda and type(number) is Tensor:
                    self._box = self._box.pin_memory()
            self._box.copy_(number, non_blocking=True)
            number = self._box
        if type(number) is not Tensor:  # a fake tensor has no value to read
            return None
        value: Any = number.tolist()  # host memory: not a sync
        return None if value != value else float(value)
