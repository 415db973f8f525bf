"""The rule against scipy's own tests and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lab.statistics import family, holm, interval, pooled, smallest_effect

ARM = [90.1, 91.4, 89.7, 92.0, 90.8]
REFERENCE = [89.0, 90.9, 89.9, 90.7, 90.0]


def test_interval_of_a_known_sample() -> None:
    # Mean 3, deviation sqrt(2.5), t(0.975, 4) = 2.776445.
    result = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.half_width == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert math.isnan(interval([1.0]).half_width)
    with pytest.raises(ValueError, match="got none"):
        interval([])


def test_one_group_without_any_spread_is_compared_without_a_warning() -> None:
    result = family({"arm": (ARM, [90.0] * 5)})["arm"]
    expected = stats.ttest_1samp(ARM, 90.0)  # Welch's test has that form where one spread is 0
    assert result.p == pytest.approx(expected.pvalue)


def test_a_family_of_one_is_welchs_test() -> None:
    expected = stats.ttest_ind(ARM, REFERENCE, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    result = family({"arm": (ARM, REFERENCE)})["arm"]
    assert result.p == result.adjusted_p == pytest.approx(expected.pvalue, rel=1e-9)
    half, mean = result.interval.half_width, result.interval.mean
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-9)


def test_a_difference_needs_the_corrected_p_value() -> None:
    pair = [3.0, 3.1, 3.3], [2.4, 2.8, 2.6]
    alone = family({0: pair})[0]
    assert alone.verdict == "higher"
    same = ARM, ARM
    among = family({0: pair} | dict.fromkeys(range(1, 9), same))
    assert among[0].p == alone.p
    assert among[0].adjusted_p == pytest.approx(9 * alone.p)
    assert among[0].verdict == "not seen"
    assert among[0].smallest > alone.smallest
    assert family({0: pair[::-1]})[0].verdict == "lower"


def test_one_seed_gives_no_verdict() -> None:
    assert family({0: ([5.0], [1.0])})[0].verdict == "one seed"


def test_one_pooled_pair_is_welchs_interval() -> None:
    alone = family({"arm": (ARM, REFERENCE[:3])})["arm"].interval
    found = pooled([(ARM, REFERENCE[:3])])
    assert (found.mean, found.half_width) == pytest.approx((alone.mean, alone.half_width))
    assert found.count == 3


def test_pooled_intervals_cover_the_true_mean() -> None:
    """Three settings with other means and spreads, three seeds each, drawn 2,000 times."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        pairs = [
            ((random.normal(level + gain, spread, 3)), random.normal(level, spread, 3))
            for level, gain, spread in ((80, 0.5, 0.3), (85, 0.0, 0.5), (90, -0.2, 0.2))
        ]
        found = pooled(pairs)
        covered += abs(found.mean - 0.1) <= found.half_width
    assert 0.935 <= covered / 2000 <= 0.975


def test_pooled_without_spread_or_with_one_seed() -> None:
    assert pooled([([2.0, 2.0], [1.0, 1.0])]).half_width == 0.0
    assert math.isnan(pooled([(ARM, REFERENCE), ([1.0], [2.0])]).half_width)


def test_no_spread_at_all() -> None:
    found = family({"same": ([1.0, 1.0], [1.0, 1.0]), "apart": ([2.0, 2.0], [1.0, 1.0])})
    assert (found["same"].p, found["apart"].p) == (1.0, 0.0)


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1; never smaller than the one before.
    assert holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    first, second = holm([math.nan, 0.03])
    assert math.isnan(first)
    assert second == pytest.approx(0.03)


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("seeds", [2, 5])
def test_smallest_effect_is_seen_four_times_out_of_five(seeds: int, size: int) -> None:
    arm, reference = ARM[:seeds], REFERENCE[:seeds]
    smallest = smallest_effect(arm, reference, family=size)
    rng = np.random.default_rng(0)
    spread = [float(np.std(each, ddof=1)) for each in (arm, reference)]
    first, second = (rng.normal(0, each, size=(40_000, seeds)) for each in spread)
    test = stats.ttest_ind(first + smallest, second, axis=1, equal_var=False)
    seen = (test.pvalue < 0.05 / size) & (test.statistic > 0)
    assert float(seen.mean()) == pytest.approx(0.8, abs=0.01)


def test_smallest_effect_at_the_ends() -> None:
    assert math.isnan(smallest_effect([1.0], [2.0]))
    assert smallest_effect([1.0, 1.0], [2.0, 2.0]) == 0.0
    assert smallest_effect(ARM[:2], REFERENCE[:2]) > smallest_effect(ARM, REFERENCE)
    assert math.isnan(smallest_effect([1.0, math.nan], [2.0, 3.0]))
