"""Training with a reducer that watches or weighs; between two steps it can be put aside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import primum
from primum.diagnostics import InterferenceMeter
from primum.experiments.images import Batches
from primum.experiments.images.batches import Batch
from primum.experiments.inspection.settings import InspectSettings


class Watched:
    """Training under way, from when this is made until `close()`.

    Args:
        settings: How to train.
        model: On its device.
        optimizer: `settings.make_optimizer(model)`.
        batches: Of the training images.
        meter: Gets the report of each step.
    """

    def __init__(
        self,
        settings: InspectSettings,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        meter: InterferenceMeter,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._batches, self._meter = batches, meter
        self._device = torch.device(settings.device)
        self._schedule = settings.make_schedule(optimizer)
        start = primum.attach if settings.reduce else primum.observe
        self._reducer = start(model, optimizer, radius=settings.radius)
        self._epoch: Iterator[Batch] | None = None
        self._coming: Batch | None = None
        self._closed = False
        self.step_count = 0
        self.losses: list[Tensor] = []

    @property
    def coming(self) -> Batch:
        """What the next step will be taken on."""
        if self._coming is None:
            epoch, first = divmod(self.step_count, len(self._batches))
            if self._epoch is None or first == 0:
                self._epoch = self._batches.epoch(epoch, first)
            self._coming = next(self._epoch).to(self._device)
        return self._coming

    def step(self) -> None:
        """Take a step."""
        if self._closed:
            raise RuntimeError("this training was closed; make another, and load its state")
        batch = self.coming
        self._model.train()
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        self.losses.append(loss.detach())
        self._meter.update(self._reducer.last, batch.ids, self.step_count)
        self.step_count += 1
        self._coming = None

    def close(self) -> None:
        """Leave the model as it was found, but trained."""
        self._reducer.remove()
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: loads with `weights_only=True`."""
        return {
            "step": self.step_count,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "reducer": self._reducer.state_dict(),
            "meter": self._meter.state_dict(),
            "losses": torch.stack(self.losses) if self.losses else torch.empty(0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a training of the same settings."""
        self.step_count = state["step"]
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._reducer.load_state_dict(state["reducer"])
        self._meter.load_state_dict(state["meter"])
        self.losses = list(state["losses"].to(self._device))
        self._epoch = self._coming = None
