"""What a step does to all samples of its batch alike, measured during plain training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lab.callbacks import Table, append
from lab.epochs import Batch
from lab.losses import cross_entropies
from lab.methods import autocast
from lab.trainer import Callback, Trainer
from primum import StepReport
from primum.diagnostics import common_shift


class CommonShift(Callback):
    """Every `shift_every` steps, each sample's loss before and after the step on its batch.

    The record has the means over all measurements:
        common_shift: Share of the change of the logits that all samples have in common.
        real_harm: Mean increase of a sample's loss, decreases counted as 0, in nats.
        common_harm: The same, if all logits moved by their mean change.
        real_change: Mean change of a sample's loss.
    """

    def __init__(self) -> None:
        self.table: Table = {}
        self._before: Tensor | None = None

    def before_step(self, trainer: Trainer) -> None:
        every = trainer.settings.shift_every
        assert every is not None
        if trainer.step_count % every == every // 2:
            trainer.stopwatch.stop()
            self._before = self._logits(trainer, trainer.coming)

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        if self._before is None:
            return
        trainer.stopwatch.stop()
        before, after = self._before, self._logits(trainer, batch)
        self._before = None
        start = cross_entropies(before, batch.targets)
        change = cross_entropies(after, batch.targets) - start
        shifted = before + (after - before).flatten(0, -2).mean(0)
        common = cross_entropies(shifted, batch.targets) - start
        row = {
            "common_shift": float(common_shift(before, after)),
            "real_harm": float(change.clamp_min(0).mean()),
            "common_harm": float(common.clamp_min(0).mean()),
            "real_change": float(change.mean()),
        }
        append(self.table, row)

    @staticmethod
    @torch.no_grad()
    def _logits(trainer: Trainer, batch: Batch) -> Tensor:
        """Logits in training mode, by a copy: batch norm's running statistics stay as they are."""
        model = copy.deepcopy(trainer.model).train()
        devices = [trainer.device] if trainer.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), autocast(trainer.settings):
            torch.manual_seed(0)  # the same dropout before and after
            logits: Tensor = model(batch.inputs).float()
        return logits

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        return {"final": {name: fmean(values) for name, values in self.table.items()}}

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table = state["table"]
