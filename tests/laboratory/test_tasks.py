"""Language models in the one laboratory: same trainer, arms, checkpoints and reports as images."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lab import cli, options
from lab.arms import ARMS, IMAGES_ONLY, Arm
from lab.callbacks import Curves, Interference, MiddleBatch
from lab.errors import UserError
from lab.job import Place, train_run
from lab.models import build_language_model
from lab.runs import read_runs
from lab.settings import Matched, RunSettings
from lab.tasks import load
from lab.trainer import Trainer
from lab.windows import Windows
from laboratory.conftest import TEXT, TEXT_WORDS, numbers, text

NAMES = [name for name in ARMS if name not in IMAGES_ONLY]


def finished(settings: RunSettings, matched: Matched | None = None) -> Trainer:
    trainer = start(settings, matched)
    while not trainer.finished:
        trainer.step()
    return trainer


def start(settings: RunSettings, matched: Matched | None = None) -> Trainer:
    callbacks = [Curves(), Interference(), MiddleBatch()]
    return Trainer(settings, load(settings), callbacks, matched=matched)


def table(trainer: Trainer, place: int = 0) -> dict[str, list[Any]]:
    return trainer.callbacks[place].table  # type: ignore[attr-defined, no-any-return]


def test_base_is_the_loop_everybody_writes() -> None:
    settings = text("base", seed=1, clip=0.5, schedule="linear")
    trainer, data = finished(settings), load(settings)
    model = build_language_model("gpt-nano", data.classes, 8, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 6)
    made = Windows(data.train, length=8, batch_size=4, seed=1)  # type: ignore[arg-type]
    for batch, _ in zip(made.epoch(0), range(6), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    for own, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)  # two forms of one line
    assert table(trainer)["step"] == [3, 6]
    assert "test_accuracy" not in table(trainer)


def test_the_loss_is_the_mean_over_held_out_tokens() -> None:
    trainer, data = finished(text("primum")), load(TEXT)
    made = Windows(data.test, length=8, batch_size=7, shuffle=False)  # type: ignore[arg-type]
    (batch,) = made.epoch(0)  # 56 of the 60 tokens
    with torch.no_grad():
        logits = trainer.model.eval()(batch.inputs)
    expected = float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
    assert table(trainer)["test_loss"][-1] == pytest.approx(expected, rel=1e-6)


def test_weights_are_per_token_unless_asked_otherwise() -> None:
    tokens, sequences = finished(text("primum")), finished(text("primum@per=sample"))
    assert len(tokens.method.last.drift) == 32  # type: ignore[union-attr]
    assert len(sequences.method.last.drift) == 4  # type: ignore[union-attr]
    assert len(finished(text("loss-weighted@per=sample")).method.last.drift) == 4  # type: ignore[union-attr]
    assert Arm.parse("primum", task="language") == Arm(
        "primum", radius=0.1, per="token", task="language"
    )
    assert Arm.parse("primum@radius=0.2", task="language").label == "primum@radius=0.2"
    assert Arm.parse("primum@per=sample", task="language").label == "primum@per=sample"


@pytest.mark.parametrize("arm", NAMES)
def test_taken_up_in_the_middle(arm: str) -> None:
    matched = Matched((1.5,), 1.0) if arm == "lr-matched" else None
    settings = text(arm, model="gpt2-nano") if arm == "base" else text(arm)
    torch.manual_seed(0)
    whole = finished(settings, matched)
    torch.manual_seed(0)
    cut = start(settings, matched)
    for _ in range(2):
        cut.step()
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    taken = start(settings, matched)
    taken.load_state_dict(torch.load(file, weights_only=True))
    while not taken.finished:
        taken.step()
    for own, other in zip(taken.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)
    assert table(taken)["test_loss"] == table(whole)["test_loss"]
    assert repr(table(taken, 1)) == repr(table(whole, 1))


def test_evaluations_between_and_over_epochs() -> None:
    """An epoch has 12 steps here; periods of 5 do not fit into it."""
    trainer = finished(text("base", steps=26, evaluate_steps=5))
    assert len(trainer.batches) == 12
    assert table(trainer)["step"] == [5, 10, 15, 20, 25, 26]
    assert table(trainer, 1)["step"] == [5, 10, 15, 20, 25, 26]


def test_warm_up_in_steps() -> None:
    trainer = start(text("base", warmup_steps=3, schedule="constant"))
    rates = []
    for _ in range(5):
        trainer.step()
        rates.append(trainer.lr / TEXT.rate)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_record_keeps_a_few_tokens_of_one_batch(place: Place) -> None:
    settings = text("primum", length=64, batch_size=6, train_size=2000, test_size=200)
    record = train_run(settings, Matched(), place)
    assert record.batch is not None
    assert len(record.batch["before"]) == 192  # every second of 384
    assert record.settings["task"] == "language"
    assert numbers(train_run(settings, Matched(), place)) == numbers(record)


def test_arms_of_images_are_refused() -> None:
    for name in IMAGES_ONLY:
        with pytest.raises(UserError, match=f"arm {name} is for images"):
            Arm(name, task="language")
    with pytest.raises(UserError, match="per=token is for language"):
        Arm("primum", per="token")


def main(*words: str) -> int:
    return cli.main(["compare", *words])


def test_all_arms_on_a_text_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "some.txt", tmp_path / "out"
    file.write_text("It was the best of times, it was the worst of times. " * 20, encoding="utf-8")
    words = ["--text", str(file), "--arms", *NAMES, "--seeds", "2", "--out", str(out), *TEXT_WORDS]
    assert main(*words) == 0
    printed = capsys.readouterr()
    for arm in NAMES:
        assert f"\n{arm} " in printed.out
    assert "loss, nats" in printed.out
    assert "could see" in printed.out
    assert "acc %" not in printed.out
    assert ", loss " in printed.err
    (command,) = {run.command for run in read_runs([out])}
    assert command.startswith("python -m lab compare --text some.txt --arms")
    assert str(tmp_path) not in (out / "summary.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"][0]["settings"]["data"].startswith("some.txt:")
    page = (out / "report.html").read_text()
    assert "held-out loss, nats per token" in page
    assert "test accuracy" not in page
    assert main(*words) == 0
    assert f"{2 * len(NAMES)} run(s) already finished" in capsys.readouterr().err


def test_words_make_a_grid(tmp_path: Path) -> None:
    words = [*TEXT_WORDS, "--tokens", "word", "--vocabulary", "20", "50", "--arms", "base"]
    assert main(*words, "--seeds", "1", "--out", str(tmp_path)) == 0
    assert sorted(run.settings["vocabulary"] for run in read_runs([tmp_path])) == [20, 50]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "FILE"], "--text needs --task language"),
        (["--task", "language", "--text", "FILE", "--data", "kjv"], "both name a text"),
        (["--task", "language", "--text", "gone.txt"], "gone.txt cannot be read"),
        (["--task", "language", "--model", "resnet20"], "unknown language model 'resnet20'"),
        (["--task", "language", "--arms", "upgrad"], "arm upgrad is for images"),
        (["--task", "language", "--length", "400000"], "too few for windows of 400000"),
        (["--task", "language", "--data", "kjv"], "kjv needs --data-dir DIR; apt-get install"),
        (["--task", "language", "--image-size", "8"], "image_size is for images"),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.txt"
    file.write_text("some text", encoding="utf-8")
    given = [str(file) if word == "FILE" else word for word in words]
    assert main(*given, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arms(parser)
    options.add_settings(parser)
    return parser.parse_args(words)


def test_defaults_of_the_command_line() -> None:
    (point,) = options.points(parse("--task", "language"))
    assert (point.model, point.data, point.optimizer) == ("gpt-nano", "python-docs", "adamw")
    assert (point.steps, point.evaluate_steps, point.clip) == (400, 50, 1.0)
    (point,) = options.points(parse("--task", "language", "--epochs", "2", "--batch-size", "8"))
    assert (point.steps, point.epochs, point.batch_size) == (None, 2, 8)
    found = options.arms(parse("--task", "language", "--arms", "primum", "--radius", "0.3"))
    assert found == [Arm("primum", radius=0.3, task="language")]


def test_settings_of_arms_are_in_the_key() -> None:
    runs = [text(arm) for arm in ("primum", "primum@per=sample", "primum@radius=0.2", "base")]
    assert len({run.key for run in runs}) == 4
    assert text("primum").arm.settings()["per"] == "token"
    assert "per" not in Arm("primum").settings()
    assert replace(TEXT, arm=Arm("base")).key == TEXT.key
