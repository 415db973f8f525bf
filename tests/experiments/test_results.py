"""Results: grouped as asked, written as strict JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from primum.experiments.results import write_json
from primum.experiments.summary import summarise

from .conftest import MakeResults


def test_runs_by_arm_in_the_order_of_seeds(make_results: MakeResults) -> None:
    results = make_results()
    assert results.recipes == ["cnn-sgd", "transformer-adamw"]
    arms = results.arms("cnn-sgd")
    assert [run.settings.seed for run in arms["permuted"]] == [0, 1, 2]
    assert {run.settings.recipe.name for runs in arms.values() for run in runs} == {"cnn-sgd"}


def test_json_is_strict_even_without_intervals(make_results: MakeResults, tmp_path: Path) -> None:
    results = make_results(seeds=1)
    path = tmp_path / "results.json"
    write_json(results, [asdict(summarise(results, "cnn-sgd"))], path)
    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    assert content["summary"][0]["rows"][0]["accuracy"]["half_width"] is None
    assert len(content["runs"]) == len(results.runs)
    assert content["environment"]["torch"]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
