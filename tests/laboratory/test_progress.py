"""What is shown while a sweep runs."""

from __future__ import annotations

import io

import pytest

from lab import progress
from lab.progress import Progress
from laboratory.conftest import record, text, tiny


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
    shown = Progress(stream)
    shown.begin(2, skipped=3)
    clock[0] = 60.0
    shown.finish(tiny("base"), record("base", 0, 0.5))
    clock[0] = 180.0
    shown.finish(tiny("primum"), record("primum", 0, 0.25))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "3 run(s) already finished; they are kept."
    assert lines[1].startswith("2 run(s) to do.")
    assert lines[2].startswith("[1/2] a model, base, seed 0, 50.00%")
    assert lines[2].endswith("about 60 s left")
    assert lines[3].endswith("all done")


def test_a_run_that_diverged_is_shown() -> None:
    stream = io.StringIO()
    gone = record("base", 0, 0.5)
    gone.final["test_accuracy"] = None
    Progress(stream).finish(tiny("base"), gone)
    assert "a model, base, seed 0, diverged, " in stream.getvalue()


def test_a_language_model_is_shown_by_its_loss() -> None:
    stream = io.StringIO()
    shown = Progress(stream)
    done = record("base", 0, 0.5)
    shown.finish(text("base"), done)
    done.final["test_loss"] = None
    shown.finish(text("base"), done)
    lines = stream.getvalue().splitlines()
    assert ", seed 0, loss 1.0000, " in lines[0]
    assert ", seed 0, diverged, " in lines[1]


def test_half_a_run_counts_half(clock: list[float]) -> None:
    stream = Terminal()
    shown = Progress(stream)
    shown.begin(2, skipped=0)
    clock[0] = 100.0
    shown.update(tiny("base").key, 0, 8)
    shown.update(tiny("base").key, 4, 8)
    shown.end()
    assert "0 of 2 runs, about 5 min left" in stream.getvalue()
    assert "25%" in stream.getvalue()


def test_steps_made_on_another_day_are_not_taken_for_speed(clock: list[float]) -> None:
    stream = Terminal()
    shown = Progress(stream)
    shown.begin(1, skipped=0)
    clock[0] = 10.0
    shown.update(tiny("base").key, 6, 8)  # taken up from a checkpoint
    assert "time left unknown" in stream.getvalue()
    clock[0] = 20.0
    shown.update(tiny("base").key, 7, 8)
    assert "about 20 s left" in stream.getvalue()
    shown.end()


def test_nothing_to_do_is_said_shortly() -> None:
    stream = io.StringIO()
    shown = Progress(stream)
    shown.begin(0, skipped=2)
    shown.end()
    assert stream.getvalue() == "2 run(s) already finished; they are kept.\n"
