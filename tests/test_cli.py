"""The command `primum`, and its demo."""

from __future__ import annotations

import sys

import pytest
import torch

import primum
from primum.cli import LABORATORY, main
from primum.demo import ARMS, noisy_digits, table, train


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--version"], 0, f"primum {primum.__version__}\n"),
        (["--help"], 0, "python -m lab"),
        (["demo", "--help"], 0, "--seeds"),
        (["demo", "--seeds", "0"], 2, "must be an integer >= 1, got 0"),
        (["cook"], 2, "invalid choice: 'cook'"),
        ([], 2, "required: command"),
    ],
)
def test_help_and_bad_arguments(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert message in printed.out + printed.err


@pytest.mark.parametrize("name", LABORATORY)
def test_what_moved_says_where(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--seeds", "3"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"python -m lab {name}" in said


def test_without_scikit_learn_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    said = "primum: demo needs scikit-learn; in a clone of the repository: pip install '.[demo]'\n"
    assert capsys.readouterr().err == said


def test_another_missing_module_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "primum.demo", None)
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_the_demo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["demo", "--seeds", "2", "--epochs", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    (place,) = (n for n, line in enumerate(lines) if line.split()[:2] == list(ARMS))
    assert lines[place + 2].count("%") == 3
    assert "2 seed(s)" in printed.out
    assert torch.get_num_threads() == threads


def test_arms_share_initialisation_and_batches_and_repeat() -> None:
    data = noisy_digits()
    assert torch.equal(noisy_digits().images, data.images)
    assert len(data.images) + len(data.test_images) == 1797
    first, again = (train(data, "base", 0, 1)[0] for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("base", "own", "shown", "said"),
    [
        ([0.8, 0.81], [0.9, 0.91], "+10.0 [+7.0, +13.0]", "does not contain 0"),
        ([0.8, 0.9], [0.81, 0.92], "+1.5", "no difference was seen"),
        ([0.8], [0.9], "+10.0", "one seed says little"),
    ],
)
def test_what_is_said(base: list[float], own: list[float], shown: str, said: str) -> None:
    text = table({"base": base, "primum": own}, {"base": [1.0, 2.0, 9.0], "primum": [3.0]}, 15)
    assert shown in text
    assert said in text
    assert "+50 %" in text
    assert all(len(line) <= 80 for line in text.splitlines())
