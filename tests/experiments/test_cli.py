"""The command line, from arguments to files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import primum
from primum.experiments import demo
from primum.experiments.arms import ARMS
from primum.experiments.cli import main


def test_quick_demo_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nested" / "demo"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert str(out / "report.html") in printed
    assert (out / "report.html").read_text(encoding="utf-8").count("<svg") == 10
    runs = json.loads((out / "results.json").read_text(encoding="utf-8"))["runs"]
    assert len(runs) == 2 * 2 * len(ARMS)
    assert all(arm in printed for arm in ARMS)

    by_arm = {
        (run["settings"]["recipe"]["name"], run["settings"]["seed"], run["settings"]["arm"]): run
        for run in runs
    }
    for (recipe, seed, arm), run in by_arm.items():
        weights = by_arm[recipe, seed, "primum"]["extra_weight"]
        expected = 1 + sum(weights) / len(weights) if arm == "lr-matched" else 1.0
        assert run["settings"]["lr_factor"] == pytest.approx(expected, rel=1e-12)
        assert run["fallbacks"] == 0


def test_base_is_always_run(tmp_path: Path) -> None:
    assert main(["demo", "--quick", "--arms", "primum", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {run["settings"]["arm"] for run in content["runs"]} == {"base", "primum"}
    assert content["command"].endswith("--arms base primum")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seeds", "0"], "got 0"),
        (["demo", "--arms", "best"], "invalid choice: 'best'"),
        (["demo", "--arms", "base", "lr-matched"], "add primum to --arms"),
        ([], "command"),
    ],
)
def test_bad_arguments_name_the_way_out(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--version"], primum.__version__),
        (["demo", "--help"], "--quick"),
        (["inspect", "--help"], "--checkpoint"),
        (["report", "--help"], "RUN"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        assert words in capsys.readouterr().out


def test_ctrl_c_leaves_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 130
    assert "Stopped" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["inspect", "--data", "cifar10", "--out", str(tmp_path)]) == 1
    said = "primum: the package datasets is missing; pip install 'primum[experiments]'\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


def test_the_core_does_not_need_the_experiments() -> None:
    code = "import sys, primum; print([m for m in sys.modules if 'primum.experiments' in m])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
