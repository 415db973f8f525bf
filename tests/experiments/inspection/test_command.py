"""From settings to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from primum.experiments.inspection import Inspection, InspectSettings
from primum.experiments.inspection.command import run_inspection
from primum.experiments.report import read_runs

from ..report.reader import check_alone_and_whole


def test_files_and_table(
    settings: InspectSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "folder"
    assert run_inspection(settings, out, command="primum inspect", threads=1) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "run.json"]
    (run,) = read_runs([out])
    assert run.complete
    assert run.command == "primum inspect"
    reader = check_alone_and_whole((out / "report.html").read_text(encoding="utf-8"))
    assert reader.tags.count("svg") >= 11
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["at", "weights"]
    assert [line for line in lines if line.startswith("step ")] == [
        line for line in lines if " plain " in line
    ]
    assert len({len(line) for line in lines[:25]}) == 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("after", [0, 2])
def test_ctrl_c_keeps_what_is_finished(
    after: int,
    settings: InspectSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = Inspection.measure

    def interrupted(self: Inspection, *args: object, **kwargs: object) -> None:
        if len(self.moments) == after:
            raise KeyboardInterrupt
        plain(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Inspection, "measure", interrupted)
    assert run_inspection(settings, tmp_path / "out") == 130
    assert "Stopped by Ctrl-C" in capsys.readouterr().err
    if after == 0:
        assert not (tmp_path / "out").exists()
        return
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert len(content["moments"]) == after
    assert not content["complete"]
    assert "did not reach" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_run_json_is_there_before_the_end(
    settings: InspectSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Inspection.measure

    def crashing(self: Inspection, *args: object, **kwargs: object) -> None:
        if len(self.moments) == 2:
            raise RuntimeError("the machine is on fire")
        plain(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Inspection, "measure", crashing)
    with pytest.raises(RuntimeError, match="fire"):
        run_inspection(settings, tmp_path)
    (run,) = read_runs([tmp_path])
    assert len(run.moments) == 2
