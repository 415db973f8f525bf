"""Which runs, in which order, and what the matched ones take over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.arms import Arm
from lab.errors import UserError
from lab.plan import matched, plan
from lab.runs import RunRecord
from lab.settings import Matched, RunSettings
from laboratory.conftest import TINY, record, tiny


def test_seed_by_seed_with_base_first_and_matched_last() -> None:
    arms = [Arm("lr-matched"), Arm("permuted"), Arm("primum")]
    runs = plan([TINY, replace(TINY, lr=0.5)], arms, range(2))
    order = [(run.seed, run.rate, run.arm.name) for run in runs]
    names = ["base", "permuted", "primum", "lr-matched"]
    assert order == [(s, lr, n) for s in (0, 1) for lr in (TINY.rate, 0.5) for n in names]


def test_stopped_anywhere_the_arms_are_balanced() -> None:
    runs = plan([TINY], [Arm(name) for name in ("primum", "paper", "focal")], range(3))
    for stop in range(len(runs)):
        counts = [sum(r.arm.name == n for r in runs[:stop]) for n in ("base", "primum", "focal")]
        assert max(counts) - min(counts) <= 1


def test_the_same_run_is_made_once() -> None:
    runs = plan([TINY, TINY], [Arm("base"), Arm("base"), Arm("primum")], range(1))
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("arm", "missing"), [("lr-matched@radius=0.3", "primum@radius=0.3"), ("time-matched", "primum")]
)
def test_what_a_matched_arm_needs_is_asked_for(arm: str, missing: str) -> None:
    with pytest.raises(UserError, match=f"is matched to {missing}; add {missing} to --arms"):
        plan([TINY], [Arm.parse(arm)], range(1))


def finder(*records: RunRecord) -> dict[str, RunRecord]:
    return {tiny(each.arm, each.seed).key: each for each in records}


def take(run: RunSettings, found: dict[str, RunRecord]) -> Matched | None:
    return matched(run, lambda each: found.get(each.key))


def test_lr_factors_are_primums_mean_weights() -> None:
    found = finder(record("primum", 1, 0.5, extra=(0.1, 0.3)))
    assert take(tiny("lr-matched", 1), found) == Matched(lr_factors=(pytest.approx(1.2),))
    by_epoch = take(tiny("lr-matched@lr_match=epoch", 1), found)
    assert by_epoch == Matched(lr_factors=(1.1, 1.3))
    assert take(tiny("lr-matched", 2), found) is None  # another seed's


def test_time_factor_is_the_ratio_of_step_times() -> None:
    found = finder(record("primum", 0, 0.5, ms=15.0), record("base", 0, 0.5, ms=10.0))
    assert take(tiny("time-matched"), found) == Matched(steps_factor=1.5)
    assert take(tiny("time-matched"), finder(record("primum", 0, 0.5))) is None
    given = take(tiny("time-matched@time_factor=2.0"), {})
    assert given == Matched(steps_factor=2.0)
    quick = finder(record("primum", 0, 0.5, ms=9.0), record("base", 0, 0.5, ms=10.0))
    assert take(tiny("time-matched"), quick) == Matched(steps_factor=1.0)


def test_others_take_over_nothing() -> None:
    assert take(tiny("permuted"), {}) == Matched()
