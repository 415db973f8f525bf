"""What is told while a sweep runs."""

from __future__ import annotations

import io

import pytest

from experiments.sweeps.conftest import record, tiny
from primum.experiments.sweeps import progress
from primum.experiments.sweeps.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_lines_with_the_time_left(clock: list[float]) -> None:
    stream = io.StringIO()
    told = Progress(stream)
    told.begin([tiny("base"), tiny("primum")], skipped=3)
    clock[0] = 60.0
    told.finish(tiny("base"), record("base", 0, 0.5))
    clock[0] = 180.0
    told.finish(tiny("primum"), record("primum", 0, 0.25))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "3 run(s) finished before; they are kept."
    assert lines[1].startswith("2 run(s) to make.")
    assert lines[2].startswith("[1/2] a model, base, seed 0, 50.00%")
    assert lines[2].endswith("about 60 s left")
    assert lines[3].endswith("all done")


def test_a_run_that_diverged_is_told() -> None:
    stream = io.StringIO()
    gone = record("base", 0, 0.5)
    gone.final["test_accuracy"] = None
    Progress(stream).finish(tiny("base"), gone)
    assert "a model, base, seed 0, diverged, " in stream.getvalue()


def test_half_a_run_counts_half(clock: list[float]) -> None:
    stream = Terminal()
    told = Progress(stream)
    told.begin([tiny("base"), tiny("primum")], skipped=0)
    clock[0] = 100.0
    told.hear(tiny("base").key, 0, 8)
    told.hear(tiny("base").key, 4, 8)
    told.end()
    assert "0 of 2 runs, about 5 min left" in stream.getvalue()
    assert "25%" in stream.getvalue()


def test_steps_made_on_another_day_are_not_taken_for_speed(clock: list[float]) -> None:
    stream = Terminal()
    told = Progress(stream)
    told.begin([tiny("base")], skipped=0)
    clock[0] = 10.0
    told.hear(tiny("base").key, 6, 8)  # taken up from a checkpoint
    assert "time left unknown" in stream.getvalue()
    clock[0] = 20.0
    told.hear(tiny("base").key, 7, 8)
    assert "about 20 s left" in stream.getvalue()
    told.end()


def test_nothing_to_do_is_said_shortly() -> None:
    stream = io.StringIO()
    told = Progress(stream)
    told.begin([], skipped=2)
    told.end()
    assert stream.getvalue() == "2 run(s) finished before; they are kept.\n"


def test_steps_of_a_run_in_this_process(clock: list[float]) -> None:
    stream = Terminal()
    told = Progress(stream)
    told.begin([tiny("base")], skipped=0)
    clock[0] = 1.0
    told.of(tiny("base"))(4, 8)
    told.end()
    assert "50%" in stream.getvalue()
