"""The example of a sharded model, run by torchrun: the training of one process."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from test_example_ddp import torchrun

EXAMPLE = Path(__file__).parent.parent / "examples" / "fsdp2.py"


@pytest.fixture(scope="module")
def example() -> Callable[[list[str]], None]:
    """Its `main`, in this process."""
    main: Callable[[list[str]], None] = runpy.run_path(str(EXAMPLE))["main"]
    return main


def load(path: Path) -> dict[str, torch.Tensor]:
    """The whole parameters in a checkpoint of any number of ranks."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in found if name.startswith("model.")]
    state = {name: torch.empty(found[name].size) for name in names}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def options(path: Path, epochs: int) -> list[str]:
    return ["--epochs", str(epochs), "--checkpoint", str(path)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_are_as_one(
    example: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten steps in float32: rounding, which AdamW's first steps enlarge, stays below 1e-3."""
    done = torchrun(2, options(tmp_path / "two", 1), EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("of 60 samples; ranks: 2")  # the global batch
    example(options(tmp_path / "one", 1))
    assert "of 60 samples; ranks: 1" in capsys.readouterr().out
    assert not dist.is_initialized()
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert len(one) == 8
    for name, value in one.items():
        assert (two[name] - value).norm() <= 1e-3 * value.norm(), name
    example(["--epochs", "1", "--resume", str(tmp_path / "two")])  # what two ranks have written
    assert "epoch 1" in capsys.readouterr().out


def test_the_added_line_matters(
    example: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights the example fails by itself: its asserts are worth something."""
    import primum

    attach = primum.attach
    monkeypatch.setattr(primum, "attach", lambda *given: attach(*given, radius=0))
    with pytest.raises(AssertionError):
        example(["--epochs", "1"])
    assert not dist.is_initialized()
