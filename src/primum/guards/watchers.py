"""Guards that watch single passes: values, discarded gradients, several calls, time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from primum.guards.steps import StepWatch
from primum.hooks.private import skip_record
from primum.kernel.engine import Engine, Observer, weak
from primum.kernel.report import StepReport
from primum.kernel.scalars import on_host, read

TIMED_STEPS = 100
DEAR = 0.2  # Of the time of a step.


class NonFinite(Observer):
    """Counts passes that stay plain because their values were not finite, as the device knows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weak(engine)

    def on_solution(self, report: StepReport) -> None:
        engine, failed = self._engine, _number(report.objective, lambda x: x == torch.inf)
        certain = engine.fallbacks.add(failed)
        if isinstance(failed, Tensor) or failed:
            engine.last = replace(report, fallbacks=engine.fallbacks.value)
        if certain:
            engine.warn(
                "values",
                "fell back to plain gradients: the step's values were not finite. If the loop uses "
                "a GradScaler, pass it as scaler=; such steps are then expected",
            )


class Discards(Observer):
    """Counts weighted passes whose gradients no optimizer step used."""

    def __init__(self, engine: Engine, steps: StepWatch, scaler: Any = None) -> None:
        self._engine, self._watch, self._scaler = weak(engine), steps, scaler
        self._pending: Tensor | int = 0  # weighted passes that no step has used yet
        self._since: tuple[tuple[int, int], object] = ((0, 0), None)

    def forget(self) -> None:
        """Drop pending passes: another state was loaded."""
        self._pending = 0

    @property
    def pending(self) -> bool:
        """Whether gradients of earlier passes were changed and no step has used them yet."""
        some = isinstance(self._pending, Tensor) or self._pending > 0
        (before, record), (now, new) = self._since, self._moment()
        return self._watch.counts and some and before == now and record is new

    def _moment(self) -> tuple[tuple[int, int], object]:
        """Changes with each step, also with one that a GradScaler skips, in its `update()`."""
        steps, version = self._watch.steps, self._engine.head.version
        return (steps, version), skip_record(self._scaler)

    def on_weighted(self, report: StepReport) -> None:
        """Not one that is not finite, nor one of zero gradients: these leave nothing to discard."""
        before = self._pending if self.pending else 0
        finite = _number(report.objective, lambda value: value < torch.inf)
        self._pending = finite * _number(report.drift.any(), lambda value: value != 0) + before
        self._since = self._moment()

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        """At the start of a backward pass: pending passes were discarded unless `.grad` is kept."""
        if again or not self.pending:
            return
        head, gone = self._engine.head, self._pending
        grads = head.grads()
        if "weight" in grads:
            gone = _number(grads["weight"].norm(), lambda value: value == 0) * gone
        elif head.holds_gradients:
            return  # on this rank, until they are reduced
        self._pending = self._pending - gone
        if self._engine.discarded.add(gone):
            self._engine.warn(
                "discarded",
                f"gradients of {self._engine.head.name!r} were reweighted, but discarded before an "
                "optimizer step used them. If that backward pass trains another network (a "
                "generator through its discriminator, an actor through its critic) or is not for "
                "training, run it inside `with reducer.paused():`; otherwise primum may change its "
                "gradients. If a GradScaler skipped the step, pass it as scaler=",
            )


class SeveralCalls(Observer):
    """Says once that the calls of the head in one backward pass are reweighted apart."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._again = weak(engine), False

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        self._again = again and grad.dim() > 1 and grad.size(0) > 1

    def before_solving(self, explicit: bool) -> None:
        if self._again and not explicit and not self._engine.plain:
            self._engine.warn(
                "calls",
                f"the head {self._engine.head.name!r} ran more than once in one backward pass (two "
                "batches, a chunked loss). Each call is reweighted on its own, without the "
                "gradients of the others; call the head once for all samples, or compute the loss "
                "as loss = reducer(losses), which covers them all",
            )


class Stopwatch(Observer):
    """Measures how long primum takes of a step, on the host's clock; says so once if it is much."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._began = weak(engine), 0.0
        self._spent = self._from = self._to = 0.0
        self._steps = 0

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        self._began = time.perf_counter()

    def before_solving(self, explicit: bool) -> None:
        self._began = self._began or time.perf_counter()

    def on_solution(self, report: StepReport) -> None:
        self._spent += time.perf_counter() - self._began
        self._began = 0.0

    def per_step(self) -> tuple[float | None, float]:
        """Seconds spent here per step since the first, and their share of the time of a step."""
        if self._steps < 3:
            return None, 0.0
        elapsed = max(self._to - self._from, 1e-9)
        return self._spent / (self._steps - 1), self._spent / elapsed

    def after_step(self, passed: bool) -> None:
        self._steps, self._to = self._steps + 1, time.perf_counter()
        if self._steps == 1:
            self._spent, self._from = 0.0, self._to
        elif self._steps == 1 + TIMED_STEPS:
            _, share = self.per_step()
            if share > DEAR:
                self._engine.warn(
                    "time",
                    f"computing sample weights takes {share:.0%} of the step time (host clock) "
                    f"with head {self._engine.head.name!r}; "
                    "recipe=primum.Primum(tolerance=..., max_iters=...) with a larger tolerance or "
                    "fewer iterations reduces it",
                    UserWarning,
                )


def _number(tensor: Tensor, true: Callable[[Any], Any]) -> Tensor | int:
    """1 if `true` of a scalar, else 0: a number where the host has it, else a tensor."""
    if on_host(tensor):
        return int(true(read(tensor)))
    counted: Tensor = true(tensor).long()
    return counted
