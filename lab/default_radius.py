"""The rule for the default radius (see docs/results.md), applied to the tuned settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from lab.tables import Group
from lab.text_tables import markdown_table

ARMS = {0.1: "primum@radius=0.1", 0.2: "primum", 0.4: "primum@radius=0.4"}
EQUAL = 0.1  # mean gains this close count as equal
SEEDS = 3  # of base and of every radius, at least


@dataclass(frozen=True)
class Gains:
    """Gain of each radius in a setting, in standard deviations of base over seeds."""

    name: str
    seeds: int
    base: float
    spread: float
    by_radius: Mapping[float, float]


def gains_of(name: str, group: Group) -> Gains | None:
    """Gains in a setting; None with fewer than three seeds of base or of a radius."""
    metric = group.judged_by
    pairs = {radius: group.pair(arm, "base", metric) for radius, arm in ARMS.items()}
    known = {radius: pair for radius, pair in pairs.items() if pair is not None}
    if len(known) < len(pairs) or min(len(pair[0]) for pair in known.values()) < SEEDS:
        return None
    base = group.table.loc["base"][metric].tolist()
    spread = stdev(base)
    by_radius = {
        radius: (fmean(own) - fmean(plain)) / spread for radius, (own, plain) in known.items()
    }
    return Gains(name, len(base), fmean(base), spread, by_radius)


def means(settings: Sequence[Gains]) -> dict[float, float]:
    """Mean gain of each radius over all settings."""
    return {radius: fmean(each.by_radius[radius] for each in settings) for radius in ARMS}


def chosen(settings: Sequence[Gains]) -> float:
    """The smallest radius whose mean gain is within `EQUAL` of the highest."""
    found = means(settings)
    best = max(found.values())
    return min(radius for radius, gain in found.items() if gain >= best - EQUAL)


def rule_table(settings: Sequence[Gains]) -> str:
    """One row per setting, their mean, and the choice."""
    rows = [
        [each.name, str(each.seeds), f"{each.base:.1f}", f"{each.spread:.2f}",
         *(f"{each.by_radius[radius]:+.2f}" for radius in ARMS)]
        for each in settings
    ]  # fmt: skip
    mean = [f"**{gain:+.2f}**" for gain in means(settings).values()]
    rows.append(["**mean**", "", "", "", *mean])
    head = ["setting", "seeds", "base, %", "spread", *(f"radius {radius}" for radius in ARMS)]
    return f"{markdown_table(head, rows)}\n\nThe rule's choice: **{chosen(settings)}**."
