"""The statistical rule of all tables and verdicts: Welch's test, Holm's correction, and power.

Two arms are said to differ only if the p-value of Welch's test, corrected for all tests of the same
family, is below 5%; otherwise no difference was seen, and `smallest` is the true difference that
the seeds would have shown four times out of five.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats
from scipy.optimize import brentq

LEVEL = 0.95
POWER = 0.8
GRID = 100  # in each direction, for the power of Welch's test: accurate to 0.001
RULE = (
    "Two arms are said to differ only if Welch's t-test over seeds gives p < 0.05 after Holm's "
    "correction for all comparisons of the table. Where no difference was seen, “could see” is the "
    "true difference that this many seeds with this spread would show four times out of five."
)
Key = TypeVar("Key")


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its 95% interval, which is NaN for fewer than two values."""

    mean: float
    half_width: float
    count: int


@dataclass(frozen=True)
class Difference:
    """One group minus another.

    Attributes:
        interval: Mean difference with Welch's 95% interval.
        p: Two-sided p-value of Welch's test.
        adjusted_p: p after Holm's correction for the family.
        smallest: True difference that is detected with 80% probability, at the strictest level of
            the correction.
    """

    interval: Interval
    p: float
    adjusted_p: float
    smallest: float

    @property
    def seen(self) -> bool:
        """Whether the two groups are said to differ."""
        return self.adjusted_p < 1 - LEVEL

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not seen`, or `one seed`."""
        if math.isnan(self.adjusted_p):
            return "one seed"
        if not self.seen:
            return "not seen"
        return "higher" if self.interval.mean > 0 else "lower"


def interval(values: Sequence[float]) -> Interval:
    """Mean with its 95% Student-t interval."""
    if not len(values):
        raise ValueError("an interval needs at least one value, got none")
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean, math.nan, count)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, float(stats.t.ppf(0.5 + LEVEL / 2, count - 1)) * error, count)


def family(
    pairs: Mapping[Key, tuple[Sequence[float], Sequence[float]] | None],
) -> dict[Key, Difference]:
    """First group minus second for every pair that there is; these are one family of tests."""
    known = {key: pair for key, pair in pairs.items() if pair is not None}
    welch = {key: _welch(first, second) for key, (first, second) in known.items()}
    adjusted = holm([p for _, p in welch.values()])
    return {
        key: Difference(found, p, corrected, smallest_effect(*known[key], family=len(known)))
        for (key, (found, p)), corrected in zip(welch.items(), adjusted, strict=True)
    }


def pooled(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Mean over several settings of the first group minus the second, with equal weights.

    Variances add up; degrees of freedom by Welch-Satterthwaite. For one pair this is Welch's
    interval.
    """
    groups = [group for pair in pairs for group in pair]
    mean = float(np.mean([np.mean(first) - np.mean(second) for first, second in pairs]))
    count = sum(min(map(len, pair)) for pair in pairs)
    if min(map(len, groups)) < 2:
        return Interval(mean, math.nan, count)
    parts = np.array([np.var(group, ddof=1) / len(group) for group in groups]) / len(pairs) ** 2
    if not parts.any():
        return Interval(mean, 0.0, count)
    freedom = parts.sum() ** 2 / sum(parts**2 / np.array([len(group) - 1 for group in groups]))
    return Interval(mean, stats.t.ppf(0.5 + LEVEL / 2, freedom) * parts.sum() ** 0.5, count)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple tests (Holm, 1979); NaN stays NaN and is not counted."""
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


def smallest_effect(first: Sequence[float], second: Sequence[float], *, family: int = 1) -> float:
    """The true difference that Welch's test detects, with its sign, four times out of five.

    Uses the number of values and the spread of the two groups; NaN for fewer than two values.

    Args:
        first: Values of one group.
        second: Values of the other.
        family: Number of tests; the level is 5% / family, the strictest of Holm's correction.
    """
    n, m = len(first), len(second)
    if n < 2 or m < 2:
        return math.nan
    var_a, var_b = float(np.var(first, ddof=1)) / n, float(np.var(second, ddof=1)) / m
    error = math.sqrt(var_a + var_b)
    if error == 0:
        return 0.0
    if not math.isfinite(error):
        return math.nan
    # Averaged over the variances that may be estimated, at midpoints of equal probability; given
    # those, the mean difference is normal.
    middles = (np.arange(GRID) + 0.5) / GRID
    drawn_a = var_a * stats.chi2.ppf(middles, n - 1)[:, None] / (n - 1)
    drawn_b = var_b * stats.chi2.ppf(middles, m - 1)[None, :] / (m - 1)
    drawn = drawn_a + drawn_b
    freedom = drawn**2 / (drawn_a**2 / (n - 1) + drawn_b**2 / (m - 1))
    bound = stats.t.isf((1 - LEVEL) / family / 2, freedom) * np.sqrt(drawn) / error

    def lacking(effect: float) -> float:
        return float(stats.norm.cdf(effect - bound).mean()) - POWER

    return error * float(brentq(lacking, 0.0, float(bound.max()) + 10))


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[Interval, float]:
    """Welch's interval and p-value; without any spread, p is 1 if the means are equal, else 0."""
    count = min(len(first), len(second))
    mean = (
        float(np.mean(np.subtract(first, second)))
        if len(first) == len(second)
        else float(np.mean(first) - np.mean(second))
    )
    if count < 2:
        return Interval(mean, math.nan, count), math.nan
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return Interval(mean, 0.0, count), float(mean == 0)
    with warnings.catch_warnings():  # equal values in a group are fine
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        found = stats.ttest_ind(first, second, equal_var=False)
    low, high = found.confidence_interval(LEVEL)
    return Interval(mean, float(high - low) / 2, count), float(found.pvalue)
