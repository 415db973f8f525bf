"""Run files: what is written is what is read, and other files are refused."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

import primum
from lab.errors import UserError
from lab.files import write_text
from lab.runs import (
    FORMAT,
    RunRecord,
    commit,
    read_runs,
    read_table,
    run_from,
    without_nan,
    write_run,
    write_table,
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
            "equal length",
        ),
    ],
)
def test_refused_content_comes_with_a_reason(content: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_from(content)


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")  # cannot be encoded
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_hold_the_same_runs_in_the_same_bytes(tmp_path: Path) -> None:
    runs = [RUN, RunRecord("n", "a", 0, final={"test_loss": 0.1 + 0.2})]
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_table(tmp_path / name, runs)
    assert read_table(tmp_path / "a.jsonl.gz") == runs
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert read_runs([tmp_path]) == runs  # the same run in two tables counts once
    (tmp_path / "a.jsonl.gz").write_bytes(b"half a fi")
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read"):
        read_runs([tmp_path])


def test_files_and_folders(tmp_path: Path) -> None:
    runs = [RunRecord("n", "base", seed) for seed in range(3)]
    write_run(runs[0], tmp_path / "one.json")
    write_run(runs[1], tmp_path / "folder" / "b.json")
    demo = {"runs": [runs[2].as_dict()]}
    (tmp_path / "folder" / "results.json").write_text(json.dumps(demo))
    (tmp_path / "folder" / "other.json").write_text('{"not": "ours"}')
    found = read_runs([tmp_path / "one.json", tmp_path / "folder", tmp_path / "one.json"])
    assert sorted(run.seed for run in found) == [0, 1, 2]
    assert len(read_runs([tmp_path, tmp_path / "one.json"])) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: JSON"),
        ("[1]", "JSON object"),
        ('{"format": "x"}', "primum-run-1"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_runs([path])
    assert "bad.json" in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no runs in"):
        read_runs([tmp_path])


def test_two_different_runs_of_the_same_settings_are_refused(tmp_path: Path) -> None:
    for name, seconds in (("a.json", 1.0), ("b.json", 2.0)):
        write_run(RunRecord("n", "base", 0, seconds=seconds), tmp_path / name)
    with pytest.raises(UserError, match=r"b\.json and .*a\.json both have n, arm base, seed 0"):
        read_runs([tmp_path])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    there = subprocess.run(words, capture_output=True, text=True, check=False)
    unknown = f"unknown ({primum.__version__})"
    commit.cache_clear()
    assert commit() == (there.stdout.strip() or unknown)
    # Installed in an environment inside of another repository.
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(primum, "__file__", str(tmp_path / "__init__.py"))
    commit.cache_clear()
    assert commit() == unknown
    commit.cache_clear()
