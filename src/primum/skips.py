"""Steps that a GradScaler skipped: they never happened, for the recipe's state either."""

from __future__ import annotations

from typing import Any

from primum.compat import skip_record
from primum.monitor import Monitor
from primum.recipe import Recipe
from primum.rescale import Rescale


class Skips:
    """Puts the recipe's state back where a GradScaler skipped the step it was for.

    A scaler skips silently. But `update()` replaces its record of optimizers, and if that is new
    while the optimizer has not stepped, the steps since were skipped.
    """

    def __init__(self, recipe: Recipe, rescale: Rescale, monitor: Monitor) -> None:
        self._recipe, self._rescale, self._monitor = recipe, rescale, monitor
        self._kept: tuple[object, int, dict[str, Any]] | None = None

    def forget(self) -> None:
        """Another state was loaded: there is nothing to put back."""
        self._kept = None

    def settle(self) -> None:
        """Before the recipe is used or saved: undo what never happened."""
        record, steps = skip_record(self._rescale.scaler), self._monitor.steps
        if record is None or not self._monitor.counts:
            return
        if self._kept is not None and self._kept[0] is not record:
            _, known_steps, state = self._kept
            if known_steps == steps:
                self._rescale.forget()
                self._monitor.forget()
            found_inf = self._monitor.found_inf
            # SYNC: with fused optimizers and recipes that have a state, alone.
            moved = found_inf is None or not state or not bool(found_inf)
            if known_steps == steps or not moved:
                self._recipe.load_state_dict(state)
            self._kept = None
        if self._kept is None:
            self._kept = record, steps, self._recipe.state_dict()
