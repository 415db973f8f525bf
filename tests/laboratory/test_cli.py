"""The command line, from arguments to files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab import cli
from lab.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--help"], 0, "one page that compares runs"),
        (["demo", "--help"], 0, "--quick"),
        (["compare", "--help"], 0, "primum@radius=0.4"),
        (["reproduce", "--help"], 0, "ablation-radius"),
        (["inspect", "--help"], 0, "--checkpoint"),
        (["report", "--help"], 0, "RUN"),
        (["demo", "--seeds", "0"], 2, "must be an integer >= 1, got 0"),
        (["demo", "--arms", "best"], 2, "invalid choice: 'best'"),
        (["demo", "--arms", "base", "lr-matched"], 2, "add primum"),
        (["compare", "--workers", "0"], 2, "must be an integer >= 1, got 0"),
        (["reproduce", "table9"], 2, "table1"),
        (["reproduce"], 2, "choose one of table1"),
        (["inspect", "--checkpoint", "a.pt", "--train-steps", "3"], 2, "not both"),
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


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["inspect", "--data", "cifar10", "--out", str(tmp_path)]) == 1
    said = "lab inspect: the package datasets is missing; pip install '.[lab]'\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


def test_also_one_that_the_laboratory_imports_at_once() -> None:
    code = (
        "import runpy, sys; sys.modules['PIL'] = None; runpy.run_module('lab', run_name='__main__')"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "lab: the package PIL is missing; pip install '.[lab]'\n"


def test_a_module_that_is_not_optional_is_a_bug() -> None:
    def broken() -> int:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    with pytest.raises(ModuleNotFoundError):
        cli.guarded("primum", broken)
