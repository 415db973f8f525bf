"""From paths to runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from primum.experiments.report.read import demo_runs, read_runs
from primum.experiments.results import write_json
from primum.experiments.runs import RunError, RunRecord, write_run

from ..conftest import MakeResults


def test_files_and_folders(tmp_path: Path) -> None:
    runs = [RunRecord("n", "base", seed) for seed in range(3)]
    write_run(runs[0], tmp_path / "one.json")
    write_run(runs[1], tmp_path / "folder" / "b.json")
    write_run(runs[2], tmp_path / "folder" / "deep" / "c.json")
    (tmp_path / "folder" / "other.json").write_text('{"not": "ours"}')
    found = read_runs([tmp_path / "one.json", tmp_path / "folder", tmp_path / "one.json"])
    assert sorted(run.seed for run in found) == [0, 1, 2]
    assert len(read_runs([tmp_path, tmp_path / "one.json"])) == 3


def test_the_demos_results(tmp_path: Path, make_results: MakeResults) -> None:
    results = make_results({"base": 0.0, "primum": 1.0, "permuted": 0.0}, seeds=2)
    write_json(results, [], tmp_path / "results.json")
    found = read_runs([tmp_path])
    assert len(found) == 2 * 3 * 2
    run = next(run for run in found if run.arm == "primum")
    assert run.name == "Group-norm CNN, SGD with momentum"
    assert run.final == {
        "test_accuracy": pytest.approx(0.81),
        "test_loss": pytest.approx(1.1),
        "ms_per_step": 2.0,
    }
    assert run.curves["epoch"] == [1, 2]
    assert run.curves["test_accuracy"][0] == 0.99
    assert run.batch == {"step": 8, "before": [0.1, -0.2, 0.3], "after": [-0.05, -0.2, 0.1]}
    assert run.command == "primum demo --seeds 3"
    applied = {run.arm: set(run.steps["applied"]) for run in found}
    assert applied == {"base": {False}, "primum": {True}, "permuted": {True}}
    assert all(("harmed_after" in run.steps) == (run.arm != "permuted") for run in found)


def test_before_and_after_json_is_the_same(make_results: MakeResults) -> None:
    results = make_results(seeds=1)
    content = {
        "runs": [asdict(run) for run in results.runs],
        "step_times": [asdict(time) for time in results.times],
        "environment": results.environment,
        "command": results.command,
    }
    assert demo_runs(content) == demo_runs(json.loads(json.dumps(content)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "JSON object"),
        ('{"format": "x"}', "primum-run-1"),
        ('{"runs": [{}], "step_times": []}', "not what primum demo writes"),
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        read_runs([path])
    assert "bad.json" in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="no runs in"):
        read_runs([tmp_path])


def test_a_run_that_comes_twice_is_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_run(RunRecord("n", "base", 0, seconds=1.0), tmp_path / name)
    with pytest.raises(RunError, match=r"b\.json and .*a\.json both have n, arm base, seed 0"):
        read_runs([tmp_path])
