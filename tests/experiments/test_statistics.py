"""Intervals and p-values against scipy's own tests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from primum.experiments.statistics import as_family, difference, holm, interval, smallest_effect

ARM = [90.1, 91.4, 89.7, 92.0, 90.8]
REFERENCE = [89.0, 90.9, 89.9, 90.7, 90.0]


def test_interval_of_a_known_sample() -> None:
    # Mean 3, deviation sqrt(2.5), t(0.975, 4) = 2.776445.
    result = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.half_width == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert (result.low, result.high) == (3.0 - result.half_width, 3.0 + result.half_width)


def test_paired_difference_equals_scipy() -> None:
    expected = stats.ttest_rel(ARM, REFERENCE)
    low, high = expected.confidence_interval(0.95)
    result = difference(ARM, REFERENCE)
    assert result.paired_p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (result.paired.low, result.paired.high) == pytest.approx((low, high), rel=1e-9)


def test_welch_difference_equals_scipy() -> None:
    expected = stats.ttest_ind(ARM, REFERENCE, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    result = difference(ARM, REFERENCE)
    assert result.welch_p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (result.welch.low, result.welch.high) == pytest.approx((low, high), rel=1e-9)


def test_a_difference_is_seen_only_when_both_intervals_leave_out_zero() -> None:
    assert difference([10.0, 11.0, 12.0], [0.0, 1.1, 2.0]).seen
    # Seed by seed always higher, but small against the spread between seeds.
    paired_only = difference([1.0, 11.1, 21.0], [0.0, 10.0, 20.0])
    assert paired_only.paired.excludes_zero
    assert not paired_only.seen
    assert not difference(ARM, ARM).seen


def test_one_seed_gives_no_interval_and_no_verdict() -> None:
    assert math.isnan(interval([1.0]).half_width)
    assert not difference([5.0], [1.0]).seen


def test_no_spread_at_all() -> None:
    same, apart = difference([1.0, 1.0], [1.0, 1.0]), difference([2.0, 2.0], [1.0, 1.0])
    assert (same.paired_p, same.welch_p) == (1.0, 1.0)
    assert (apart.paired_p, apart.welch_p) == (0.0, 0.0)


def test_bad_input_names_the_value() -> None:
    with pytest.raises(ValueError, match="got none"):
        interval([])
    with pytest.raises(ValueError, match="got 2 and 1 values"):
        difference([1.0, 2.0], [1.0])


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1; never smaller than the one before.
    assert holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_out_what_is_not_a_number() -> None:
    first, second = holm([math.nan, 0.03])
    assert math.isnan(first)
    assert second == pytest.approx(0.03)


@pytest.mark.parametrize("family", [1, 3, 10])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_smallest_effect_is_seen_four_times_out_of_five(seeds: int, family: int) -> None:
    arm, reference = ARM[:seeds], REFERENCE[:seeds]
    smallest = smallest_effect(arm, reference, family=family)
    rng = np.random.default_rng(0)
    spread = [float(np.std(each, ddof=1)) for each in (arm, reference)]
    first, second = (rng.normal(0, each, size=(40_000, seeds)) for each in spread)
    test = stats.ttest_ind(first + smallest, second, axis=1, equal_var=False)
    seen = (test.pvalue < 0.05 / family) & (test.statistic > 0)
    assert float(seen.mean()) == pytest.approx(0.8, abs=0.01)


def test_smallest_effect_at_the_ends() -> None:
    assert math.isnan(smallest_effect([1.0], [2.0]))
    assert smallest_effect([1.0, 1.0], [2.0, 2.0]) == 0.0
    few, many = smallest_effect(ARM[:2], REFERENCE[:2]), smallest_effect(ARM, REFERENCE)
    assert few > many
    assert math.isnan(smallest_effect([1.0, math.nan], [2.0, 3.0]))


def test_a_family_makes_differences_harder_to_see() -> None:
    change = difference(ARM, REFERENCE)
    first, missing, last = as_family([change, None, replace(change, welch_p=0.03)])
    assert missing is None
    assert first is not None
    assert last is not None
    assert (first.adjusted_p, last.adjusted_p) == pytest.approx(holm([change.welch_p, 0.03]))
    clear = difference([3.0, 3.1, 3.2], [1.0, 1.2, 1.1])
    assert clear.seen
    assert replace(clear, adjusted_p=0.04).seen
    assert not replace(clear, adjusted_p=0.06).seen
