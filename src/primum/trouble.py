"""Steps that stayed plain: counted on the device, warned about once, never waited for."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from primum.mailbox import Mailbox


class Trouble:
    """How many steps fell back to plain gradients, and which kinds were told already.

    Attributes:
        count: Of steps, so far. Where the model is: only the device knows some of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._known = 0
        self._mailbox = Mailbox()
        self._told: set[str] = set()

    def load(self, count: Tensor) -> None:
        self.count = count.to(self.count.device, copy=True)
        self._known = int(count)  # SYNC: once, when a run is resumed

    def step(self, kind: str, reason: str) -> None:
        """A step stays plain, for a reason the host knows."""
        self.count = self.count + 1
        self._known += 1
        self.warn(kind, f"plain gradients in a step: {reason}")

    def maybe(self, failed: Tensor) -> None:
        """A step stays plain if `failed`, which the device knows. Warns late, but never waits."""
        self.count = self.count + failed
        seen = self._mailbox.read(self.count)
        if seen is not None and seen > self._known:
            self.warn(
                "values",
                "plain gradients in a step: its values were not finite. If the loop has a "
                "GradScaler, pass it as scaler=: then such steps are in order",
            )

    def warn(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"primum: {message}", RuntimeWarning, stacklevel=2)
