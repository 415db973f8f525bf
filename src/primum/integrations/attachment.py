"""A Reducer created when training starts, from settings given earlier."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

import primum
from primum import Reducer, StepReport
from primum.api import recipe_of
from primum.tokens.layout import Granularity

PREFIX = "primum/"


class Attachment:
    """Manages a callback's Reducer, for all frameworks: begin, end, state, metrics.

    Frameworks create the callback before the optimizer, may load a checkpoint before or after
    training starts, and save one after it has ended. So a state loaded early is kept until
    `begin`, and the last state and report are kept after `end`.

    Attributes:
        reducer: The `Reducer` during training, otherwise None.
        last: Report of the last step, kept after `end`; None before the first step.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self.reducer: Reducer | None = None
        self._last: StepReport | None = None
        self._waiting: dict[str, Any] | None = None
        self._final: dict[str, Any] = {}
        self._logged: StepReport | None = None
        # Fail on wrong settings here, not when training starts.
        signature(primum.attach).bind(None, None, **settings)
        recipe_of(settings.get("recipe", "primum"), settings.get("radius"))
        Granularity(settings.get("per", "auto"), "")

    @property
    def last(self) -> StepReport | None:
        return self._last if self.reducer is None else self.reducer.last

    def begin(
        self, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Attach a new Reducer; ends an earlier run first."""
        self.end()
        found = {} if scaler is None else {"scaler": scaler}
        self.reducer = primum.attach(model, optimizer, **(found | self._settings))
        if self._waiting is not None:
            self.reducer.load_state_dict(self._waiting)
        self._waiting = self._last = self._logged = None

    def end(self) -> str:
        """Remove the Reducer from the model. Returns its summary, for a log."""
        summary = ""
        if self.reducer is not None:
            summary = self.reducer.summary_text()
            self._last, self._final = self.reducer.last, self.reducer.state_dict()
            self.reducer.remove()
            self.reducer = None
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Current state of the Reducer, or its last one after `end`; empty before `begin`."""
        return self._final if self.reducer is None else self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the Reducer, or keep it for the next `begin`."""
        if self.reducer is not None:
            self.reducer.load_state_dict(state)
        else:
            self._waiting = dict(state)

    def forget(self) -> None:
        """Drop a loaded state that is not for training."""
        self._waiting = None

    @property
    def headline(self) -> str:
        """Log line that names the reweighted layer."""
        if self.reducer is None:
            return "primum: not attached, no sample weights are applied"
        return f"primum: sample weights are applied at the output of {self.reducer.head_name}"

    def figures(self) -> dict[str, float]:
        """`last.as_dict()` with prefixed names; only `applied` = 0 if there is no new report."""
        if self.last is None or self.last is self._logged:
            return {} if self.reducer is None else {PREFIX + "applied": 0.0}
        self._logged = self.last
        return {PREFIX + name: value for name, value in self.last.as_dict().items()}
