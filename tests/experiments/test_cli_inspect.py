"""`primum inspect`, from arguments to files, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from primum.experiments.cli import main
from primum.experiments.models import build_model
from primum.experiments.sweeps.compare import typed_command

SMALL = ["inspect", "--data", "generated", "--train-size", "32", "--test-size", "16"]


def test_while_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--batch-size", "16", "--train-steps", "2", "--every", "2", "--reduce"]
    assert main([*given, "--optimizer", "adamw", "-o", str(tmp_path / "out")]) == 0
    assert "step 2" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert content["arm"] == "primum"
    assert content["settings"]["optimizer"] == "adamw"
    assert content["complete"]
    assert content["command"].startswith("primum inspect --data generated")
    assert str(tmp_path) not in json.dumps(content)
    assert (tmp_path / "out" / "report.html").exists()


def test_digits_at_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt"
    torch.save(build_model("cnn-small", 10, 8, seed=3).state_dict(), path)
    given = ["inspect", "--data", "digits", "--train-size", "64", "--batch-size", "16"]
    assert main([*given, "--checkpoint", str(path), "-o", str(tmp_path)]) == 0
    assert "model.pt (new optimizer)" in capsys.readouterr().out


def test_folders_of_this_machine_are_not_written_down(tmp_path: Path) -> None:
    own = str(tmp_path)
    typed = ["inspect", "--data-dir", own, f"--data-dir={own}", "-o", f"{own}/out"]
    assert typed_command(typed) == "primum inspect --data-dir DIR --data-dir=DIR -o out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet-9000"], "unknown model 'resnet-9000'; choose from cnn-small"),
        (["--data", "mnist3"], "unknown data 'mnist3'; choose from cifar10"),
        (["--data", "cifar10", "--data-dir", "no/such/folder"], "no/such/folder does not exist"),
        (["--checkpoint", "no.pt"], "no.pt does not exist"),
        (["--batch-size", "33"], "there are 32 samples"),
        (["--norm", "batch", "--train-steps", "0"], "--norm group"),
        (["--augment", "magic"], "unknown augmentation 'magic'"),
        (["--lr", "0"], "lr must be > 0"),
        (["--device", "foo"], "device 'foo' cannot be used here"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*SMALL, "--batch-size", "16", *arguments, "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not out.exists()


def test_a_checkpoint_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt"
    torch.save(build_model("cnn-small", 7, 8).state_dict(), path)
    assert main([*SMALL, "--batch-size", "16", "--checkpoint", str(path)]) == 1
    assert "size mismatch for head.weight" in capsys.readouterr().err


def test_one_of_the_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--checkpoint", "x", "--train-steps", "5"])
    assert "give one" in capsys.readouterr().err
