"""Time that counts and time that does not."""

from __future__ import annotations

import math

import pytest
import torch

from lab import stopwatch
from lab.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    for name in ("process_time", "perf_counter"):
        monkeypatch.setattr(stopwatch, name, lambda: now[0])
    return now


@pytest.fixture
def watch(clock: list[float]) -> Stopwatch:
    return Stopwatch(torch.device("cpu"))


def test_steps_that_are_not_timed_count_as_the_others(clock: list[float], watch: Stopwatch) -> None:
    assert math.isnan(watch.seconds_per_step)
    watch.count()  # not timed
    watch.start()
    for _ in range(2):
        clock[0] += 3.0
        watch.count()
    assert watch.seconds_per_step == pytest.approx(3.0)
    watch.stop()
    clock[0] += 100.0
    assert watch.seconds_per_step == pytest.approx(3.0)
    assert watch.seconds == pytest.approx(9.0)


def test_it_goes_on_from_its_state(clock: list[float], watch: Stopwatch) -> None:
    watch.start()
    clock[0] += 2.0
    watch.count()
    state = watch.state_dict()
    later = Stopwatch(torch.device("cpu"))
    later.load_state_dict(state)
    clock[0] += 50.0
    later.start()
    clock[0] += 4.0
    later.count()
    assert later.seconds_per_step == pytest.approx(3.0)
