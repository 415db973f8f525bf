"""Run files: what is written is what is read, and what is no run is told apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from primum.experiments.runs import (
    FORMAT,
    RunError,
    RunRecord,
    run_from,
    without_nan,
    write_run,
    write_whole,
)

RUN = RunRecord("name", "primum", 3, steps={"step": [0, 1], "gap": [0.5, 0.1]})


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write_run(RUN, path)
    assert run_from(json.loads(path.read_text())) == RUN
    assert [each.name for each in path.parent.iterdir()] == ["run.json"]


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    record = RunRecord("n", "a", 0, final={"test_loss": math.nan}, curves={"epoch": [math.inf]})
    write_run(record, tmp_path / "run.json")
    read = run_from(json.loads((tmp_path / "run.json").read_text()))
    assert read.final == {"test_loss": None}
    assert read.curves == {"epoch": [None]}


def test_without_nan_keeps_the_rest() -> None:
    assert without_nan({"a": (1, "x", None, 2.5, True, -math.inf)}) == {
        "a": [1, "x", None, 2.5, True, None]
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "JSON object"),
        ({"format": "other"}, "primum-run-1"),
        ({"format": FORMAT, "arm": "a", "seed": 0}, '"name"'),
        ({"format": FORMAT, "name": "n", "arm": "a", "seed": "0"}, '"seed"'),
        ({"format": FORMAT, "name": "n", "arm": "a", "seed": 0, "stepps": {}}, "stepps"),
        ({"format": FORMAT, "name": "n", "arm": "a", "seed": 0, "steps": {"gap": [1]}}, "step"),
        ({"format": FORMAT, "name": "n", "arm": "a", "seed": 0, "curves": {"x": []}}, "epoch"),
        (
            {"format": FORMAT, "name": "n", "arm": "a", "seed": 0, "steps": {"step": [], "a": [1]}},
            "equally long",
        ),
    ],
)
def test_what_is_no_run_is_told_with_a_reason(content: object, message: str) -> None:
    with pytest.raises(RunError, match=message):
        run_from(content)


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")  # cannot be encoded
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
