"""The command line, from arguments to files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest

import primum
import primum_cli
from primum.experiments import cli
from primum.experiments.cli import main


def test_help_and_version_do_not_import_torch() -> None:
    """Half a second for `primum --help`: the interpreter and argparse, nothing else."""
    code = "import sys, primum_cli\ntry:\n    primum_cli.main(['--help'])\nfinally:\n    print('torch' in sys.modules)"  # noqa: E501
    start = perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert perf_counter() - start < 5  # on a busy machine
    assert done.stdout.splitlines()[-1] == "False"
    assert all(name in done.stdout for name in primum_cli.COMMANDS)


@pytest.mark.parametrize("entry", [primum_cli.main, main])
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--version"], 0, primum.__version__),
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
    entry, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as stopped:
        entry(words)
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert message in printed.out + printed.err


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["inspect", "--data", "cifar10", "--out", str(tmp_path)]) == 1
    said = "primum inspect: the package datasets is missing; pip install 'primum[experiments]'\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_every_command_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['PIL'] = None; import primum_cli; sys.exit(primum_cli.main(['demo']))"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = "primum: the package PIL is missing; pip install 'primum[experiments]'\n"
    assert done.stderr == said


def test_a_module_that_is_not_optional_is_a_bug() -> None:
    def broken() -> int:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    with pytest.raises(ModuleNotFoundError):
        cli.guarded("primum", broken)


def test_the_core_does_not_need_the_experiments() -> None:
    code = "import sys, primum; print([m for m in sys.modules if 'primum.experiments' in m])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
