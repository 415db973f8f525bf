"""Step times: one per arm, positive."""

from __future__ import annotations

from primum.experiments.arms import ARMS
from primum.experiments.recipes import Recipe
from primum.experiments.timing import time_steps


def test_one_time_per_arm(tiny: Recipe) -> None:
    times = time_steps(tiny, list(ARMS), seed=4, turns=1)
    assert [time.arm for time in times] == list(ARMS)
    assert all(time.milliseconds > 0 for time in times)
    assert {(time.recipe, time.seed) for time in times} == {(tiny.name, 4)}
