"""A fused loss under DistributedDataParallel: with the other ranks as under the hook, or alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parent / "fused_child.py"
GLOBAL, OWN = (4 + 5) * 9, (4 * 9, 5 * 9)  # tokens of both ranks, and of each


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and by way to call the loss."""
    folder = tmp_path_factory.mktemp("ranks")
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(folder), str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for child in children:
        try:
            out, errors = child.communicate(timeout=200)
        finally:
            child.kill()
        assert child.returncode == 0, errors
        lines = [line for line in out.splitlines() if line.startswith("{")]  # gloo may print, too
        found.append({each["way"]: each for each in map(json.loads, lines)})
    return found


def test_small_problems_are_solved_together(records: list[dict[str, Any]]) -> None:
    for record in records:
        found = record["whole"]
        assert found["counts"] == [GLOBAL] * 4
        assert found["largest"] > 0.01
        assert 0 <= found["apart"] < 1e-9
        assert found["said"] == []


@pytest.mark.parametrize("way", ["blocks", "one in blocks", "outside"])
def test_otherwise_each_rank_is_alone_and_says_so(records: list[dict[str, Any]], way: str) -> None:
    """Also where one rank alone computes in blocks: nobody waits for it."""
    for record, tokens in zip(records, OWN, strict=True):
        found = record[way]
        assert found["counts"] == [tokens] * 4
        assert found["fallbacks"] == 0
        assert found["largest"] > 0.01
        (said,) = found["said"]
        reason = "outside DistributedDataParallel" if way == "outside" else "in blocks"
        assert reason in said
        assert "each rank solves for its own tokens" in said


def test_ranks_stay_in_step(records: list[dict[str, Any]]) -> None:
    for way in records[0]:
        assert records[0][way]["parameters"] == records[1][way]["parameters"]
