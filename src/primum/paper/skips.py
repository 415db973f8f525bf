"""Steps that a GradScaler skipped: they never happened, for the guards' averages either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from primum.hooks.private import skip_record

if TYPE_CHECKING:
    from primum.paper.literal import Paper


class Skips:
    """Puts the guards' averages back where a GradScaler skipped the step they were for.

    A scaler skips silently. But `update()` replaces its record of optimizers, and if that is new
    while the optimizer has not stepped, the steps since were skipped.
    """

    def __init__(self, recipe: Paper, scaler: Any, watch: Any) -> None:
        self._recipe, self._scaler, self._watch = recipe, scaler, watch
        self._kept: tuple[object, int, dict[str, Any]] | None = None

    def forget(self) -> None:
        """Another state was loaded: there is nothing to put back."""
        self._kept = None

    def settle(self) -> None:
        """Before the averages are used or saved: undo what never happened."""
        record, steps = skip_record(self._scaler), self._watch.steps
        if record is None or not self._watch.counts:
            return
        if self._kept is not None and self._kept[0] is not record:
            _, known_steps, state = self._kept
            found_inf = self._watch.found_inf
            # SYNC: with fused optimizers alone.
            if known_steps == steps or (found_inf is not None and bool(found_inf)):
                self._recipe.restore(state)
            self._kept = None
        if self._kept is None:
            self._kept = record, steps, self._recipe.averages()
