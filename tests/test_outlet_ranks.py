"""A frozen head over several ranks: what one process gives on the joined batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rank_child import train
from test_distributed import assert_same, launch

RUNS: dict[str, dict[str, Any]] = {
    f"{optimizer}-{way}": {
        "frozen": True,
        "counts": [12, 7],
        "dtype": "float64",
        "optimizer": optimizer,
        "way": way,
        "steps": 8,
    }
    for optimizer in ("SGD", "AdamW")
    for way in ("gather", "sum")
}
RUNS["accumulated"] = RUNS["SGD-gather"] | {"micro_batches": 2, "clip": 0.05}
RUNS["one rank in trouble"] = RUNS["SGD-gather"] | {"trouble": "eval"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    children = launch(folder, 2, RUNS)
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    parts = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]
    return {name: [part[name] for part in parts] for name in RUNS}


@pytest.mark.parametrize("name", [each for each in RUNS if "trouble" not in each])
def test_equals_one_process(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    expected = train(RUNS[name])
    assert max(max(report["weights"]) for report in expected["reports"]) > 0.1
    for found in results[name]:
        assert found["warnings"] == []
        assert_same(found, expected, 1e-9)


def test_trouble_on_one_rank_leaves_that_step_plain_on_all(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    one, two = results["one rank in trouble"]
    assert one["params"] == two["params"]
    for found in (one, two):
        assert [report["applied"] for report in found["reports"]] == [1.0] * 5 + [0.0, 1.0, 1.0]
