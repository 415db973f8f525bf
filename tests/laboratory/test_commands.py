"""`compare`, `inspect` and `report` from end to end: results, SIGKILL, every user error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from PIL import Image

from lab import cli, sweep
from lab.arms import ARMS as ALL_ARMS
from lab.models import build_model
from lab.runs import RunRecord, read_runs, write_run
from lab.trainer import Trainer
from laboratory.conftest import TINY_WORDS, numbers, record
from laboratory.images.conftest import WriteParquet, own_caches, some_images, write_parquet

__all__ = ["own_caches", "write_parquet"]  # fixtures


ARMS = list(ALL_ARMS)
ROOT = Path(__file__).resolve().parents[2]


def main(words: list[str]) -> int:
    return cli.main(["compare", *words])


def runs_in(out: Path) -> dict[tuple[str, int], RunRecord]:
    return {(run.arm, run.seed): run for run in read_runs([out / "runs"])}


def files_in(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file()]


def test_all_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["--arms", *ARMS, "primum@radius=0.3", "--seeds", "2", "--out", str(out), *TINY_WORDS]
    assert main(words) == 0
    printed = capsys.readouterr()
    for arm in (*ARMS, "primum@radius=0.3"):
        assert f"\n{arm} " in printed.out
    assert len(runs_in(out)) == 2 * (len(ARMS) + 1)
    assert not list((out / "checkpoints").iterdir())
    summary = json.loads((out / "summary.json").read_text())
    assert [arm["arm"] for arm in summary["settings"][0]["arms"]][:2] == ["base", "primum"]
    assert "<svg" in (out / "report.html").read_text()
    assert str(tmp_path) not in (out / "summary.md").read_text()

    before = {path: path.read_bytes() for path in (out / "runs").iterdir()}
    assert main(words) == 0
    assert f"{2 * len(ARMS) + 2} run(s) already finished" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (out / "runs").iterdir()} == before


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    words = ["--arms", "base", "--seeds", "1", "--tensorboard", "--out", str(tmp_path)]
    assert main([*words, *TINY_WORDS]) == 0
    (folder,) = (tmp_path / "tensorboard").iterdir()
    (events,) = folder.glob("events*")
    assert not list(tmp_path.glob(".*"))
    assert main([*words, *TINY_WORDS]) == 0
    assert list(folder.iterdir()) == [events]  # no second time


def test_curves_of_a_run_are_written_when_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep.train_run

    def second(run, *rest):  # type: ignore[no-untyped-def]
        if run.arm.name == "primum":
            (folder,) = (tmp_path / "tensorboard").iterdir()
            assert folder.name.startswith("base-seed0-")
        return real(run, *rest)

    monkeypatch.setattr(sweep, "train_run", second)
    words = ["--arms", "primum", "--seeds", "1", "--tensorboard", "--out", str(tmp_path)]
    assert main([*words, *TINY_WORDS]) == 0
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:primum:RuntimeWarning")
def test_diverged_runs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds", "2", "--lr", "0.1", "1e9", "--ema", "0.9", "--out", str(tmp_path)]
    assert main([*words, *TINY_WORDS]) == 0
    printed = capsys.readouterr()
    assert "diverged" in printed.err
    good, gone = printed.out.split("(lr 0.1)")[1].split("(lr 1000000000.0)")
    assert "test acc %" in good
    assert "test acc %" not in gone
    assert "<svg" in (tmp_path / "report.html").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    for arm in summary["settings"][1]["arms"]:
        figures = ("accuracy", "loss", "ema_accuracy", "accuracy_test", "loss_test")
        assert [arm[name] for name in figures] == [None] * 5


def test_killed_twice_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    arms = ["primum", "permuted", "lr-matched", "time-matched@time_factor=1.5"]
    words = ["--arms", *arms, "--seeds", "1", *TINY_WORDS]
    words += ["--epochs", "10", "--checkpoint-seconds", "0"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for finished in (1, 2):
        _kill(words, cut, after=finished)
    assert main([*words, "--out", str(cut)]) == 0
    assert main([*words, "--out", str(whole)]) == 0
    taken, undisturbed = runs_in(cut), runs_in(whole)
    assert taken.keys() == undisturbed.keys()
    for key, run in undisturbed.items():
        assert numbers(taken[key]) == numbers(run), key
    assert not files_in(cut / "checkpoints")


def _kill(words: list[str], out: Path, after: int) -> None:
    """SIGKILL once some runs are finished and another is under way."""
    command = [sys.executable, "-m", "lab", "compare", *words, "--out", str(out)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, **quiet) as child:
        limit = monotonic() + 120
        while monotonic() < limit and child.poll() is None:
            finished = {path.stem for path in out.glob("runs/[a-z]*")}
            begun = {path.stem for path in out.glob("checkpoints/[a-z]*")}
            if len(finished) >= after and begun - finished:
                break
            sleep(0.002)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert begun - finished


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep.train_run

    def pressed(run, *rest):  # type: ignore[no-untyped-def]
        if run.arm.name == "primum":
            raise KeyboardInterrupt
        return real(run, *rest)

    words = ["--arms", "primum", "--seeds", "1", "--out", str(tmp_path), *TINY_WORDS]
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "train_run", pressed)
        assert main(words) == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert list(runs_in(tmp_path)) == [("base", 0)]
    assert main(words) == 0


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> str:
    """The message, after checking the exit code and that no result was left."""
    assert main(["--seeds", "1", "--out", str(out), *words]) in (
        1,
        2,
    )  # 1 for a package that is missing
    assert not files_in(out)
    return capsys.readouterr().err


def test_unknown_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "out", "--arms", "magic", *TINY_WORDS)
    assert said.startswith("lab compare: unknown arm 'magic'; choose from base, paper, primum")


def test_unknown_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "out", "--model", "magic", *TINY_WORDS)
    assert "unknown model 'magic'" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["--ema", "1.0"], "ema must be >= 0 and below 1"),
        (["--beta1", "1", "--optimizer", "adamw"], "beta1 must be >= 0 and below 1"),
        (["--nesterov", "--momentum", "0"], "nesterov needs momentum > 0"),
        (["--model", "cnn-small", "convnext-t"], "convnext-t: image_size must be >= 32, got 8"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_settings_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    said = refused(capsys, tmp_path / "out", *TINY_WORDS, *words)
    assert said.startswith(f"lab compare: {message}")
    assert said.count("\n") == 1  # before any run


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("torchjd.aggregation", ["--arms", "upgrad", *TINY_WORDS]),
        ("tensorboard", ["--tensorboard", *TINY_WORDS]),
        ("datasets", ["--data", "cifar10"]),
    ],
)
def test_missing_packages(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    words: list[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    *_, said = refused(capsys, tmp_path / "out", *words).splitlines()
    assert missing.partition(".")[0] in said
    assert said.endswith("; pip install '.[lab]'")


def test_more_workers_than_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "out", "--workers", "4096", *TINY_WORDS)
    assert "4096 workers were requested, but there are" in said


def test_bad_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "out", "--data-dir", str(tmp_path / "nowhere"))
    assert "nowhere" in said


def test_missing_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write_parquet: WriteParquet
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", some_images(4), [0, 1, 2, 3], label_column="x")
    said = refused(capsys, tmp_path / "out", "--data-dir", str(tmp_path), "--batch-size", "2")
    assert "label" in said
    assert "column" in said


def test_corrupt_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write_parquet: WriteParquet
) -> None:
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    images = [*some_images(3), file.getvalue()[:30]]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", images, [0, 1, 2, 3])
    said = refused(capsys, tmp_path / "out", "--data-dir", str(tmp_path), "--batch-size", "2")
    assert "cannot decode the image in row 3 of the train split" in said


LOOK_WORDS = ["--data", "digits", "--train-size", "100", "--batch-size", "32", "--augment", "none"]


def test_inspect_while_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", *LOOK_WORDS, "--train-steps", "3", "--every", "2", "-o", str(tmp_path)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "step 2  plain" in printed
    (run,) = read_runs([tmp_path])
    assert run.complete
    assert [moment["step"] for moment in run.moments] == [0, 2, 3]
    assert run.command == f"python -m lab {' '.join(words[:-1])} {tmp_path.name}"
    assert run.environment["threads"] == "1"
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_inspect_checkpoints_and_untrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model("cnn-small", 10, 8, seed=1)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    words = ["inspect", *LOOK_WORDS, "-o", str(tmp_path / "out")]
    assert cli.main([*words, "--checkpoint", str(tmp_path / "a.pt"), "--batches", "2"]) == 0
    assert "a.pt (new optimizer)" in capsys.readouterr().out
    (run,) = read_runs([tmp_path / "out"])
    assert run.complete
    assert len(run.moments) == 2
    assert cli.main([*words, "--train-steps", "0", "--reduce"]) == 0
    (run,) = read_runs([tmp_path / "out"])
    assert (run.arm, [moment["label"] for moment in run.moments]) == ("primum", ["step 0"])
    assert cli.main([*words, "--checkpoint", str(tmp_path / "none.pt")]) == 2
    assert capsys.readouterr().err.startswith("lab inspect: checkpoint")


def test_inspect_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Trainer.step

    def pressed(self: Trainer) -> None:
        if self.step_count == 2:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Trainer, "step", pressed)
    words = ["inspect", *LOOK_WORDS, "--train-steps", "4", "--every", "1", "-o", str(tmp_path)]
    assert cli.main(words) == 130
    assert "finished measurements are kept" in capsys.readouterr().err
    (run,) = read_runs([tmp_path])
    assert not run.complete
    assert len(run.moments) == 2


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm, accuracy in (("base", 0.5), ("primum", 0.6)):
        for seed in range(3):
            run = record(arm, seed, accuracy + 0.001 * seed)
            write_run(run, tmp_path / "runs" / f"{arm}{seed}.json")
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path / "runs"), "-o", str(page), "--title", "Ours"]) == 0
    printed = capsys.readouterr().out
    assert "a model: Primum compared with base: test accuracy higher by 10.0 points" in printed
    assert "6 run(s)" in printed
    assert "<h1>Ours</h1>" in page.read_text()
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
