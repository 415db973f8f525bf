"""A run killed by SIGKILL and resumed ends as the uninterrupted run does, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from resume_child import CASES, main

CHILD = Path(__file__).with_name("resume_child.py")
KILLS = [
    # step, moment, step that the next process goes on from
    (4, "before the optimizer's step", 3),
    (11, "while saving", 9),
]


def child(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHILD), str(folder), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def end(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng(devices=[]):
        main(folder)
    return end(folder)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Killed again and again, then left alone."""
    folder = tmp_path_factory.mktemp("killed")
    first = 0
    for step, moment, then in KILLS:
        done = child(folder, step, moment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (folder / "end.pt").exists()
        assert done.stdout == f"from step {first}\n"
        first = then
    done = child(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"from step {first}\n"
    return end(folder)


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Everything in a nested state, by its path."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, each in items for k, v in flat(each, f"{name}/{key}").items()}
    return {name: state}


@pytest.mark.parametrize(("recipe", "kind"), CASES)
def test_killed_and_resumed(
    whole: dict[str, Any], resumed: dict[str, Any], recipe: str, kind: str
) -> None:
    """Parameters first, then all the rest: optimizer, scheduler, scaler, reducer."""
    one, other = flat(whole[f"{recipe} {kind}"]), flat(resumed[f"{recipe} {kind}"])
    assert one.keys() == other.keys()
    assert sum(name.startswith("/model") for name in one) == 4
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
