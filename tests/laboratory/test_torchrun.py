"""Two processes that share each batch end where one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.cli import main
from lab.errors import UserError
from lab.runs import read_runs
from lab.settings import LookSettings
from lab.torchrun import Ranks, check_device, computes_bf16, current, joined
from laboratory.conftest import TINY_WORDS, tiny

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["compare", "--arms", "primum", "paper", "permuted", "--seeds", "1", *TINY_WORDS]


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main([*WORDS, "--out", str(alone)]) == 0
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "lab", *WORDS, "--out", str(together)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert "test acc %" in told[0][0]
    assert told[1][0] == ""
    first, second = (
        {run.arm: run for run in read_runs([out / "runs"])} for out in (alone, together)
    )
    assert first.keys() == second.keys() == {"base", "primum", "paper", "permuted"}
    assert second["base"].environment["ranks"] == "2"
    for arm in ("base", "primum", "paper"):
        for name in ("train_loss", "test_loss"):
            # Sums in another order; permuted deals to samples in another order, too.
            assert second[arm].curves[name] == pytest.approx(first[arm].curves[name], rel=2e-4)


def test_alone_nothing_is_joined() -> None:
    with joined("cpu") as ranks:
        assert ranks == current() == Ranks(0, 1)
    assert Ranks().leads
    assert not Ranks(1, 2).leads
    assert torch.equal(Ranks().mean(torch.ones(2)), torch.ones(2))


def test_what_cannot_be_shared() -> None:
    Ranks(0, 2).check(tiny("primum"))
    with pytest.raises(UserError, match="batch_size must be a multiple of the 3 ranks, got 8"):
        Ranks(0, 3).check(tiny("primum"))
    with pytest.raises(UserError, match="loss-weighted works in a single process only"):
        Ranks(0, 2).check(tiny("loss-weighted"))
    Ranks().check(tiny("loss-weighted"))
    with pytest.raises(UserError, match="inspect works in a single process"):
        Ranks(0, 2).check(tiny(look=LookSettings()))


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:1000000"])
def test_a_device_that_cannot_be_used(name: str) -> None:
    check_device("cpu")
    with pytest.raises(UserError, match=f"device '{name}' cannot be used here: [^\n]*; choose"):
        check_device(name)
    with pytest.raises(UserError, match="cannot be used here"), joined(name):
        pass


def test_each_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Ranks(1, 2).device("cuda") == torch.device("cuda", 1)
    assert Ranks(1, 2).device("cpu") == Ranks().device("cpu") == torch.device("cpu")


def test_whether_a_device_computes_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda known=known: known
        )
        assert computes_bf16("cpu") is known
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda known=known, **_: known)
        assert computes_bf16("cuda") is known
