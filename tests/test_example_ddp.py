"""The example of several ranks, run by torchrun: the training of one process."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp.py"
# Any free port of this machine, whatever its name resolves to.
TORCHRUN = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr localhost --nproc-per-node"


@pytest.fixture(scope="module")
def example() -> Callable[[list[str]], None]:
    """Its `main`, in this process."""
    main: Callable[[list[str]], None] = runpy.run_path(str(EXAMPLE))["main"]
    return main


def options(path: Path, epochs: int) -> list[str]:
    return ["--epochs", str(epochs), "--checkpoint", str(path)]


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def torchrun(
    ranks: int, given: list[str], example: Path = EXAMPLE
) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN.split(), str(ranks)]
    checkpoint = Path(given[given.index("--checkpoint") + 1])
    before = checkpoint.read_bytes() if checkpoint.is_file() else None
    for left in range(5, -1, -1):
        done = subprocess.run(
            [*command, str(example), *given],
            env=own | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        # On a fast machine gloo aborts a process in one of four runs, after its work is done.
        if not left or "terminate called without an active exception" not in done.stderr:
            break
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink(missing_ok=True)
        if before is not None:
            checkpoint.write_bytes(before)
    return done


def test_two_processes_are_as_one(
    example: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty steps in float32, in which the weights move by a tenth.

    By itself the difference is 1e-7. Other rounding, as with more threads, may change where a
    solver stops, and later steps enlarge that.
    """
    done = torchrun(2, options(tmp_path / "two.pt", 2))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert [line.split("harmed")[0].split()[:2] for line in lines] == [
        ["epoch", "1"],
        ["epoch", "2"],
    ]
    assert all(line.endswith("of 60 samples; ranks: 2") for line in lines)  # the global batch

    example(options(tmp_path / "one.pt", 2))
    assert "of 60 samples; ranks: 1" in capsys.readouterr().out
    one, two = load(tmp_path / "one.pt"), load(tmp_path / "two.pt")
    assert one["epoch"] == two["epoch"] == 2
    alone, both = (torch.cat([v.flatten() for v in run["model"].values()]) for run in (one, two))
    difference = (both - alone).norm() / alone.norm()
    assert difference <= 0.02, difference


def test_resumes_and_leaves_no_group(
    example: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example(options(tmp_path / "whole.pt", 2))
    whole = load(tmp_path / "whole.pt")
    assert not dist.is_initialized()
    example(options(tmp_path / "parts.pt", 1))
    capsys.readouterr()
    example(options(tmp_path / "parts.pt", 2))
    assert capsys.readouterr().out.count("epoch") == 1  # only the second
    for name, value in load(tmp_path / "parts.pt")["model"].items():
        torch.testing.assert_close(value, whole["model"][name], rtol=0, atol=0)


def test_the_added_line_matters(
    example: Callable[[list[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights the example fails by itself: its asserts are worth something."""
    import primum

    attach = primum.attach
    monkeypatch.setattr(primum, "attach", lambda *given: attach(*given, radius=0))
    with pytest.raises(AssertionError):
        example(["--epochs", "1"])
    assert not dist.is_initialized()
