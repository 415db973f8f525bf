"""Tables of the tuned small networks on docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.default_radius import ARMS
from lab.formatting import show, show_mean
from lab.study_results import in_words
from lab.tables import Group
from lab.text_tables import markdown_table


def speed_table(groups: Sequence[Group]) -> str:
    """Test loss of base, when each radius reaches it, and time per step."""
    rows = []
    for group in groups:
        steps = [show(group.interval(arm, "steps_to_base"), 2) for arm in ARMS.values()]
        times = [show_mean(group.interval(arm, "time_ratio"), 2) for arm in ARMS.values()]
        row = [in_words(group.settings), show(group.interval("base", "loss"), 3)]
        rows.append([*row, *steps, " / ".join(times)])
    radii = [f"steps to, {radius}" for radius in ARMS]
    return markdown_table(["", "base's test loss", *radii, "time x, 0.1 / 0.2 / 0.4"], rows)


def rate_table(groups: Sequence[Group]) -> str:
    """Base's accuracy by learning rate, one row per setting; the best is bold.

    Diverged runs have no accuracy.
    """
    found: dict[str, dict[float, float]] = {}
    for group in groups:
        rate, base = group.settings["lr"], group.interval("base", "accuracy")
        name = in_words(group.settings, rate=False)
        found.setdefault(name, {})[rate] = math.nan if base is None else base.mean
    rows = []
    for name, by_rate in found.items():
        best = max(value for value in by_rate.values() if not math.isnan(value))
        tried = []
        for rate, value in sorted(by_rate.items()):
            shown = f"{rate:g}: " + ("diverged" if math.isnan(value) else f"{value:.2f}")
            tried.append(f"**{shown}**" if value == best else shown)
        rows.append([name, ", ".join(tried)])
    return markdown_table(["", "learning rate: accuracy of base, %"], rows)
