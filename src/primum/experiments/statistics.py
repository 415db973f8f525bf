"""Intervals and tests over seeds: Student's t for a mean, paired and Welch for a difference,
Holm for several of them, and what a number of seeds could have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student

LEVEL = 0.95
POWER = 0.8
GRID = 100  # in each direction, for the power of Welch's test: right to 0.001


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its 95% interval, which is not a number below two values."""

    mean: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside; never without an interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Difference:
    """Arm minus reference. Paired: seed by seed, which share their start; Welch: as two groups.

    `adjusted_p` is Welch's p-value corrected for the family it belongs to, if it has one.
    """

    paired: Interval
    paired_p: float
    welch: Interval
    welch_p: float
    adjusted_p: float | None = None

    @property
    def seen(self) -> bool:
        """Called a difference only when both intervals leave out zero, and the family agrees."""
        among_others = self.adjusted_p is None or self.adjusted_p < 1 - LEVEL
        return self.paired.excludes_zero and self.welch.excludes_zero and among_others


def interval(values: Sequence[float]) -> Interval:
    """Mean with its 95% Student-t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    mean = float(np.mean(values))
    n = len(values)
    if n < 2:
        return Interval(mean, math.nan, n)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, _quantile(n - 1) * error, n)


def difference(arm: Sequence[float], reference: Sequence[float]) -> Difference:
    """Arm minus reference, value by value in the same order of seeds."""
    if len(arm) != len(reference):
        raise ValueError(f"arms must share their seeds, got {len(arm)} and {len(reference)} values")
    n = len(arm)
    changes = [a - b for a, b in zip(arm, reference, strict=True)]
    paired = interval(changes)
    if n < 2:
        return Difference(paired, math.nan, paired, math.nan)
    var_a, var_b = float(np.var(arm, ddof=1)) / n, float(np.var(reference, ddof=1)) / n
    error = math.sqrt(var_a + var_b)
    # Welch-Satterthwaite; without any spread the degrees of freedom do not matter.
    freedom = (n - 1) * (var_a + var_b) ** 2 / (var_a**2 + var_b**2) if error > 0 else 2.0 * (n - 1)
    welch = Interval(paired.mean, _quantile(freedom) * error, n)
    paired_error = paired.half_width / _quantile(n - 1)
    return Difference(
        paired,
        _p_value(paired.mean, paired_error, n - 1),
        welch,
        _p_value(welch.mean, error, freedom),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for being a family (Holm, 1979); what is not a number stays so.

    Calling those below 5% differences errs in one family of twenty, if there are none.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


def as_family(found: Sequence[Difference | None]) -> list[Difference | None]:
    """The same differences, each with its p-value corrected for all of them (Holm)."""
    adjusted = holm([math.nan if each is None else each.welch_p for each in found])
    return [
        None if each is None else replace(each, adjusted_p=p)
        for each, p in zip(found, adjusted, strict=True)
    ]


def smallest_effect(arm: Sequence[float], reference: Sequence[float], *, family: int = 1) -> float:
    """The true difference that Welch's test would call one, with its sign, four times out of five.

    With as many seeds and as much spread as were found; not a number below two seeds.

    Args:
        arm: Values of one group.
        reference: Of the other.
        family: Of so many tests; the level is that of the first of them by Holm, 5% over their
            number, which is the strictest.
    """
    n, m = len(arm), len(reference)
    if n < 2 or m < 2:
        return math.nan
    var_a, var_b = float(np.var(arm, ddof=1)) / n, float(np.var(reference, ddof=1)) / m
    error = math.sqrt(var_a + var_b)
    if error == 0:
        return 0.0
    if not math.isfinite(error):
        return math.nan
    # Over what the two spreads may come out as, by midpoints of equal probability; given those,
    # the mean difference is normal.
    middles = (np.arange(GRID) + 0.5) / GRID
    drawn_a = var_a * chi2.ppf(middles, n - 1)[:, None] / (n - 1)
    drawn_b = var_b * chi2.ppf(middles, m - 1)[None, :] / (m - 1)
    drawn = drawn_a + drawn_b
    freedom = drawn**2 / (drawn_a**2 / (n - 1) + drawn_b**2 / (m - 1))
    bound = student.isf((1 - LEVEL) / family / 2, freedom) * np.sqrt(drawn) / error

    def lacking(effect: float) -> float:
        return float(norm.cdf(effect - bound).mean()) - POWER

    return error * float(brentq(lacking, 0.0, float(bound.max()) + 10))


def _quantile(freedom: float) -> float:
    return float(student.ppf(0.5 + LEVEL / 2, freedom))


def _p_value(mean: float, error: float, freedom: float) -> float:
    """Two-sided; without spread, 1 for no difference and 0 for any."""
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * student.sf(abs(mean) / error, freedom))
