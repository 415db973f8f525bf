"""Several ranks: no collective where one may be missing, and what one process gives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .rank_scenes import sharded

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
LIMIT = 40.0  # Seconds after which ranks that wait for each other are killed.


def run(folder: Path, scene: str, *runs: dict[str, Any], ranks: int = 2) -> list[tuple[Any, ...]]:
    """What a scene returns by rank, for each run; fails if a rank dies or does not end in time."""
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "defects.rank_scenes"),
                *(str(folder), str(rank), str(ranks), scene, json.dumps(runs)),
            ],
            cwd=Path(__file__).resolve().parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    until = time.monotonic() + LIMIT
    errors, late = [], False
    for child in children:
        try:
            errors.append(child.communicate(timeout=max(until - time.monotonic(), 0.1))[1])
        except subprocess.TimeoutExpired:
            late = True
            child.kill()
            errors.append(child.communicate()[1])
    assert not late, "\n".join(["the ranks did not end in time", *errors])
    assert [child.returncode for child in children] == [0] * ranks, "\n".join(errors)
    files = [folder / f"result-{rank}.json" for rank in range(ranks)]
    return list(zip(*(json.loads(each.read_text()) for each in files), strict=True))


UNEVEN = ("micro_batches", "unused_head")


@pytest.mark.parametrize("scene", UNEVEN)
def test_plain_training_ends(tmp_path: Path, scene: str) -> None:
    """Guards the next test: DistributedDataParallel itself has no trouble with this."""
    ((one, other),) = run(tmp_path, scene, {"radius": None})
    assert one["params"] == other["params"]


@pytest.mark.parametrize("radius", [0.0, 0.4])
@pytest.mark.parametrize("scene", UNEVEN)
def test_no_rank_waits_for_one_that_does_not_come(
    tmp_path: Path, scene: str, radius: float
) -> None:
    """The ranks go on together: plainly at radius 0, and with some weights otherwise."""
    plain, (one, other) = run(tmp_path, scene, {"radius": None}, {"radius": radius})
    assert one["params"] == other["params"]
    if radius == 0:
        assert one["params"] == plain[0]["params"]
    else:
        assert max(one["largest"], other["largest"]) > 0.01


def test_adamw_under_fully_shard_is_one_process(tmp_path: Path) -> None:
    """In float64 with 6 + 6 samples: weights to 1e-6 in every step, and so the parameters."""
    settings: dict[str, Any] = {"seeds": [0, 19, 22], "steps": 3}
    expected = sharded(0, 1, **settings)
    assert max(max(map(max, each)) for each in expected["weights"]) > 0.1
    (ranks,) = run(tmp_path, "sharded", settings)
    for found in ranks:
        for key in ("weights", "params"):
            one, other = torch.tensor(found[key]), torch.tensor(expected[key])
            assert (one - other).abs().max() <= 1e-6, key


def test_a_sharded_model_can_be_converted_after_a_step(tmp_path: Path) -> None:
    """By `.cpu()` and `.to()`, attached and after `remove()`."""
    (ranks,) = run(tmp_path, "converted", {})
    assert ranks == ({}, {})
