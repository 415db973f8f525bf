"""Default callbacks of a run: evaluation curves, interference per epoch, one batch in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lab.epochs import Batch
from lab.trainer import Callback, Trainer
from primum import StepReport
from primum.diagnostics import InterferenceMeter

Table = dict[str, list[Any]]
SHOWN = {"images": 1024, "language": 256}  # samples of one batch that are kept


class Curves(Callback):
    """Losses, accuracy, learning rate and time after every `evaluate_every` epochs."""

    def __init__(self) -> None:
        self.table: Table = {}
        self._losses: list[Tensor] = []  # since the last evaluation

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        self._losses.append(trainer.loss)

    def after_epoch(self, trainer: Trainer) -> None:
        settings = trainer.settings
        skipped = trainer.step_count // trainer.period % settings.evaluate_every
        if not trainer.finished and settings.evaluate_steps is None and skipped:
            return
        loss, accuracy = trainer.evaluate()
        row = {
            "epoch": trainer.step_count / len(trainer.batches),
            "step": trainer.step_count,
            "train_loss": float(trainer.ranks.mean(torch.stack(self._losses).double().mean())),
            "test_loss": loss,
            "test_accuracy": accuracy,
            "lr": trainer.lr,
            "seconds": trainer.stopwatch.seconds,
        }
        if trainer.average is not None:
            ema = trainer.evaluate(trainer.average)
            row["ema_test_loss"], row["ema_test_accuracy"] = ema
        if settings.task == "language":  # judged by its loss alone
            row = {name: value for name, value in row.items() if not name.endswith("accuracy")}
        append(self.table, row)
        self._losses = []

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        final = {
            name: values[-1]
            for name, values in self.table.items()
            if name.endswith(("loss", "accuracy")) or name == "step"
        }
        return {"curves": dict(self.table), "final": final}

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table, self._losses = state["table"], list(state["losses"])


class Interference(Callback):
    """One row per epoch: means of the reports of its observed steps."""

    def __init__(self) -> None:
        self.table: Table = {}
        self._meter = InterferenceMeter()  # of this epoch

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        self._meter.update(report, step=trainer.step_count - 1)

    def after_epoch(self, trainer: Trainer) -> None:
        row: dict[str, float] = {"step": trainer.step_count}
        for name, values in self._meter.table().items() if self._meter.steps else ():
            known = [float(value) for value in values if value == value]
            if name == "fallbacks":
                row[name] = known[-1] if known else 0.0
            elif name not in ("step", "applied"):
                row[name] = fmean(known) if known else float("nan")
        append(self.table, row)
        self._meter = InterferenceMeter()

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        if "fallbacks" not in self.table:  # nothing was observed
            return {}
        applied = [trainer.method.weighs] * len(self.table["step"])
        return {
            "steps": {**self.table, "applied": applied},
            "final": {"fallbacks": self.table["fallbacks"][-1]},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table, "meter": self._meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table = state["table"]
        self._meter.load_state_dict(state["meter"])


class MiddleBatch(Callback):
    """First-order loss changes in the first observed batch of the second half of training.

    At most `SHOWN` of them, evenly spaced: a batch of text has thousands of tokens.
    """

    def __init__(self) -> None:
        self.batch: dict[str, Any] | None = None

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        if self.batch is None and report is not None and trainer.step_count > trainer.steps // 2:
            # Drift is the change of `loss / B` per unit of lr.
            scale = trainer.lr * len(report.drift)
            every = -(-len(report.drift) // SHOWN[trainer.settings.task])
            self.batch = {
                "step": trainer.step_count,
                "before": short(scale * report.drift[::every]),
                "after": short(scale * report.drift_after[::every]),
            }

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        return {"batch": self.batch}

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batch = state["batch"]


def peak_memory(run: Callable[[], object]) -> int:
    """Peak bytes of torch's CPU allocator during `run`, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    kineto = seen.profiler.kineto_results if seen.profiler is not None else None
    assert kineto is not None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in events), initial=0)))


def append(table: Table, row: Mapping[str, float]) -> None:
    """Add a row to a table of columns."""
    for name, value in row.items():
        table.setdefault(name, []).append(value)


def short(values: Tensor) -> list[float]:
    """Values rounded to five significant digits, enough for a plot."""
    return [float(f"{value:.5g}") for value in values.tolist()]
