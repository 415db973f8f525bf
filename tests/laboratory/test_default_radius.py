"""The rule for the default radius, on gains made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.default_radius import ARMS, Gains, chosen, gains_of, rule_table
from lab.runs import RunRecord
from lab.tables import Group, group_runs
from laboratory.conftest import record


def group(seeds: int, *, without: str = "", views: bool = False) -> Group:
    """Base at 50% with a spread of one point; radii 1, 2 and 4 points above it."""
    runs: list[RunRecord] = []
    for seed in range(seeds):
        base = 0.50 + 0.01 * (seed - 1)
        ends = {"base": base} | {
            arm: base + 0.1 * radius for radius, arm in ARMS.items() if arm != without
        }
        for arm, accuracy in ends.items():
            several = {"views_test_accuracy": accuracy + 0.1} if views else {}
            runs.append(replace(record(arm, seed, accuracy, **several), settings={"epochs": 1}))
    (made,) = group_runs(runs)
    return made


def setting(*gains: float) -> Gains:
    return Gains("a setting", 3, 50.0, 1.0, dict(zip(ARMS, gains, strict=True)))


@pytest.mark.parametrize("views", [False, True])
def test_gains_are_in_units_of_the_spread_of_base(views: bool) -> None:
    found = gains_of("a setting", group(3, views=views))
    assert found is not None
    assert found.seeds == 3
    assert found.base == pytest.approx(60.0 if views else 50.0)
    assert found.spread == pytest.approx(1.0)
    assert dict(found.by_radius) == pytest.approx({0.1: 1.0, 0.2: 2.0, 0.4: 4.0})


def test_settings_with_too_few_seeds_do_not_count() -> None:
    assert gains_of("two seeds", group(2)) is None
    assert gains_of("no radius 0.4", group(3, without=ARMS[0.4])) is None


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([(0.0, 1.0, 0.5)], 0.2),
        ([(0.0, 1.0, 1.09)], 0.2),  # about equal: the smaller one
        ([(0.0, 1.0, 1.11)], 0.4),
        ([(0.95, 1.0, 1.04)], 0.1),
        ([(3.0, 0.0, 0.0), (0.0, 2.0, 2.5)], 0.1),  # the mean over settings decides
        ([(-1.0, -2.0, -3.0)], 0.1),
    ],
)
def test_the_choice(gains: list[tuple[float, ...]], expected: float) -> None:
    settings = [setting(*each) for each in gains]
    assert chosen(settings) == expected
    assert f"The rule's choice: **{expected}**." in rule_table(settings)
