"""The demo: a grid of ordinary runs, the same numbers as ever, resumed like any sweep."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lab import sweep
from lab.cli import DEMO_ARMS, main
from lab.demo import CNN, points
from lab.images.made import noisy_digits
from lab.models import GroupNormCNN
from lab.runs import read_runs


def test_base_is_the_loop_everybody_writes() -> None:
    """Initialisation, order and schedule of the demo's first version, written out."""
    from lab.images import load_data
    from lab.trainer import Trainer

    settings = points(epochs=2)[0]
    trainer = Trainer(settings, load_data(settings.data_settings()))
    while not trainer.finished:
        trainer.step()
    images, labels, *_ = noisy_digits(512)
    torch.manual_seed(0)
    model = GroupNormCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for rows in torch.randperm(512, generator=generator).view(-1, 64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    for own, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)  # two forms of one cosine


def test_warm_up_is_a_tenth_of_the_steps() -> None:
    cnn, transformer = points(epochs=15)
    assert (cnn.warmup, transformer.warmup) == (0.0, 1.5)
    assert cnn == CNN


def test_quick_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "nested" / "demo"
    words = ["demo", "--quick", "--out", str(out)]
    real = sweep.train_run

    def pressed(run, *rest):  # type: ignore[no-untyped-def]
        if run.seed == 1:
            raise KeyboardInterrupt
        return real(run, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(sweep, "train_run", pressed)
        assert main(words) == 130
    assert "Finished runs are kept" in capsys.readouterr().err
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "8 run(s) already finished" in printed.err
    assert str(out / "report.html") in printed.out
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("Two arms are said to differ") == 1  # one rule
    runs = read_runs([out / "results.json"])
    assert len(runs) == 2 * 2 * len(DEMO_ARMS)
    assert {run.name for run in runs} == {"Group-norm CNN, SGD with momentum", "Transformer, AdamW"}
    assert all(arm in printed.out for arm in DEMO_ARMS)
    by_arm = {(run.name, run.seed, run.arm): run for run in runs}
    for (name, seed, arm), run in by_arm.items():
        assert run.final["fallbacks"] == 0
        if arm == "lr-matched":
            extra = by_arm[name, seed, "primum"].steps["mean_extra_weight"]
            expected = 1 + sum(extra) / len(extra)
            assert run.arm_settings["lr_factors"] == [pytest.approx(expected, rel=1e-12)]
    assert (json.loads((out / "results.json").read_text()))[
        "command"
    ] == "python -m lab demo --quick --out demo"


@pytest.mark.parametrize("ranks", [["--ranks", "2"], ["--ranks=2"]])
def test_ranks_are_torchruns(
    ranks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command under torchrun, without the option; test_torchrun.py runs two ranks."""
    started: list[list[str]] = []

    def start(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", start)
    assert main(["demo", "--quick", *ranks, "--out", str(tmp_path)]) == 7
    (command,) = started
    assert command[-5:] == ["lab", "demo", "--quick", "--out", str(tmp_path)]
    assert command[command.index("--nproc-per-node") + 1] == "2"
