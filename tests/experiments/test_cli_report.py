"""`primum report`, from arguments to a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from primum.experiments.cli import main
from primum.experiments.results import write_json
from primum.experiments.runs import RunRecord, write_run

from .conftest import MakeResults
from .report.reader import check_alone_and_whole


def test_a_demo_and_a_run_on_one_page(
    tmp_path: Path, make_results: MakeResults, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    write_json(make_results(), [], tmp_path / "demo" / "results.json")
    write_run(RunRecord("my net", "base", 0), tmp_path / "run.json")
    out = tmp_path / "new" / "page.html"
    given = [str(tmp_path / "demo"), str(tmp_path / "run.json")]
    assert main(["report", *given, "-o", str(out), "--title", "Mine"]) == 0
    reader = check_alone_and_whole(out.read_text(encoding="utf-8"))
    assert "Mine" in reader.text
    printed = capsys.readouterr().out
    assert "Group-norm CNN, SGD with momentum: Between primum and base" in printed
    assert "my net: Only base was run" in printed
    assert "25 run(s)" in printed
    assert str(out) in printed


@pytest.mark.parametrize("name", ["nowhere.json", "broken.json"])
def test_bad_runs_leave_no_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{")
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / name), "-o", str(out)]) == 1
    assert name in capsys.readouterr().err
    assert not out.exists()


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(RunRecord("n", "base", 0), tmp_path / "run.json")
    (tmp_path / "file").write_text("")
    arguments = ["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "file" / "page.html")]
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("primum report: ")
