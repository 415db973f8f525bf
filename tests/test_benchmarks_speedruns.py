"""The speedruns for a GPU, at a toy size on the CPU: whole files, and arms that differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from primum.experiments.images import DataSettings, load_data
from primum.experiments.models.whitened import WhitenedCNN

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "speedruns"
CIFAR = [
    *("--generated", "--widths", "8", "8", "8", "--epochs", "2", "--batch-size", "32"),
    *("--device", "cpu", "--precision", "fp32"),
]
LANGUAGE = [
    *("--width", "16", "--depth", "1", "--heads", "2", "--length", "16", "--batch-size", "4"),
    *("--steps", "6", "--every", "3", "--validation-batches", "2", "--device", "cpu"),
    *("--precision", "fp32", "--lr", "0.01"),
]
Load = Callable[[str], ModuleType]


def runs_of(path: Path, command: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["format"] == "primum-speedrun-1"
    assert content["command"].startswith(f"python benchmarks/speedruns/{command} ")
    assert {"torch", "gpu", "primum"} <= content["environment"].keys()
    runs: list[dict[str, Any]] = content["runs"]
    return runs


@pytest.mark.parametrize(
    ("script", "words", "steps"), [("cifar", CIFAR, [4, 8]), ("language", LANGUAGE, [3, 6])]
)
def test_every_arm_and_seed(
    script: str,
    words: list[str],
    steps: list[int],
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "runs.json"
    target = ["--target", "0" if script == "cifar" else "9"]  # reached at once
    more = ["--arms", "base", "0", "0.4", "--runs", "2", "--out", str(out), *target]
    assert load(script).main([*words, *more]) == 0
    runs = runs_of(out, f"{script}.py")
    assert [(run["arm"], run["seed"]) for run in runs] == [
        (arm, seed) for seed in (0, 1) for arm in ("base", "0", "0.4")
    ]
    for run in runs:
        assert run["curve"]["steps"] == steps
        assert run["curve"]["seconds"] == sorted(run["curve"]["seconds"])
        assert run["reached"] == [steps[0], run["curve"]["seconds"][0]]
        assert run["fallbacks"] == 0
    base, zero, other = (run["curve"]["values"] for run in runs[:3])
    assert base == zero  # a radius of 0 is plain training, bit for bit
    assert script == "cifar" or other != base  # accuracies of 64 images may be the same
    printed = capsys.readouterr().out
    assert "steps to target" in printed
    assert f"{steps[0]} ± 0" in printed


def test_weights_change_the_training_on_images(load: Load, monkeypatch: Any) -> None:
    cifar = load("cifar")
    data = load_data(DataSettings("generated", train_size=64, test_size=16, image_size=16))
    splits = [cifar.OnDevice(data, name, torch.device("cpu")) for name in ("train", "test")]
    plain, seen = WhitenedCNN.forward, []

    def forward(model: WhitenedCNN, images: torch.Tensor) -> torch.Tensor:
        seen.append(plain(model, images))
        return seen[-1]

    monkeypatch.setattr(WhitenedCNN, "forward", forward)
    options = argparse.Namespace(
        device="cpu", widths=[8, 8, 8], epochs=2, lr=11.5, weight_decay=0.0153, batch_size=32,
        compile=False, precision="fp32", target=None,
    )  # fmt: skip
    ends = []
    for arm in ("base", "0.4"):
        cifar.train(arm, 0, options, *splits)
        ends.append(seen[-1])
    assert not torch.equal(ends[0], ends[1])


def test_batches_on_the_device(load: Load) -> None:
    data = load_data(DataSettings("generated", train_size=50, test_size=16, image_size=16))
    split = load("cifar").OnDevice(data, "train", torch.device("cpu"))
    split.images = torch.arange(50.0).view(50, 1, 1, 1) + torch.linspace(0, 0.5, 16).view(1, 1, 16)
    split.images = split.images.expand(50, 3, 16, 16).contiguous()  # brighter to the right
    mirrored = []
    for epoch in range(2):
        found = list(split.epoch(epoch, 16, seed=3))
        assert len(found) == 3
        again = list(split.epoch(epoch, 16, seed=3))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found, again, strict=True))
        images = torch.cat([images for images, _ in found])
        labels = torch.cat([labels for _, labels in found])
        ids = images.mean((1, 2, 3)).long()
        assert len(ids.unique()) == 48  # each at most once
        assert torch.equal(labels, split.labels[ids])
        # In the middle, where nothing is reflected.
        falling = images[:, 0, 0, 4] > images[:, 0, 0, 11]
        mirrored.append(dict(zip(ids.tolist(), falling.tolist(), strict=True)))
    both = mirrored[0].keys() & mirrored[1].keys()
    assert all(mirrored[0][id] != mirrored[1][id] for id in both)


def test_tokens_of_a_file(load: Load, tmp_path: Path) -> None:
    language = load("language")
    for name in ("train.bin", "val.bin"):
        np.arange(300, dtype=np.uint16).tofile(tmp_path / name)
    tokens = language.read_tokens(tmp_path / "train.bin", "train")
    windows = language.batch(tokens, torch.tensor([0, 7]), 4, torch.device("cpu"))
    assert windows.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]
    files = ["--train", str(tmp_path / "train.bin"), "--validation", str(tmp_path / "val.bin")]
    with pytest.raises(SystemExit):
        language.main([*LANGUAGE, *files])  # without --vocabulary
    words = [*files, "--vocabulary", "300", "--arms", "0.1", "--runs", "1"]
    out = tmp_path / "runs.json"
    assert language.main([*LANGUAGE, *words, "--out", str(out)]) == 0
    assert len(runs_of(out, "language.py")) == 1


def test_time_to_a_target(load: Load) -> None:
    measure = load("_measure")
    curve = measure.Curve([1, 2, 3], [0.1, 0.2, 0.3], [0.5, 0.9, 0.8])
    assert measure.first_reached(curve, 0.8, higher=True) == (2, 0.2)
    assert measure.first_reached(curve, 0.5, higher=False) == (1, 0.1)
    assert measure.first_reached(curve, 0.95, higher=True) is None
    assert measure.first_reached(curve, None, higher=True) is None


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("cifar", [*CIFAR, "--arms", "best"], "an arm is base or a radius >= 0, got 'best'"),
        ("cifar", [*CIFAR, "--batch-size", "999"], "but there are 128 images"),
        ("language", [*LANGUAGE, "--train", "x"], "give both --train and --validation"),
        ("language", [*LANGUAGE, "--length", "9999999"], "must be longer than --length"),
    ],
)
def test_errors(
    script: str, words: list[str], message: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(script).main(words)
    assert message in capsys.readouterr().err


def test_the_commands_of_the_page_exist(load: Load) -> None:
    page = (FOLDER / "README.md").read_text()
    assert "Nobody has run these on a GPU" in page
    options: set[str] = set()
    for block in page.split("```sh")[1:]:
        options |= {word for word in block.split("```")[0].split() if word.startswith("--")}
    sources = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    for option in options:
        assert f'"{option}"' in sources or f'"{option[2:]}"' in sources, option
