"""`primum reproduce` from end to end, at the smallest scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primum.experiments.sweeps.reproduce.cli import NAMES, main


def test_table_1_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table1", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "91.71 -> 91.93 (+0.22), 1.13x" in printed
    assert "not judged" in printed
    content = json.loads((tmp_path / "smoke" / "table1.json").read_text())
    assert len(content["findings"]) == 32
    assert content["notes"][0].startswith("Two steps")
    assert str(tmp_path) not in (tmp_path / "smoke" / "table1.md").read_text()

    # Its runs serve the ablation too; and without --resume a folder in use is refused.
    assert main(["ablation-radius", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    assert "run(s) finished before" in capsys.readouterr().err
    assert main(["table1", "--scale", "smoke", "--no-resume", "--out", str(tmp_path)]) == 1
    assert "has runs already" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in NAMES)
    assert "full 240 runs, 5 seed(s); small 144 runs, 3 seed(s)" in printed  # 16 cells, 3 arms


def test_a_name_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["table9"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
    assert "table1" in capsys.readouterr().err


def test_bad_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["table1", "--scale", "small", "--seeds", "1", "--data-dir", str(tmp_path / "nowhere")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize("name", ["figure1", "figure2", "multilayer", "gram", "gram-adamw"])
def test_what_would_be_ignored_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--scale", "smoke", "--out", str(tmp_path / "out")]
    assert main([*words, "--workers", "999"]) == 1
    assert "999 workers were asked for" in capsys.readouterr().err
    assert main([*words, "--seeds", "7"]) == 1
    assert "leave out --seeds and --workers" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.json"))
