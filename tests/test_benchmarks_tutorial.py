"""The tutorial's measurements run, and every table of the page comes from the committed results."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tutorial.json"
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark as its own directory sees it, as `python benchmarks/...` would."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield load
    sys.modules.pop("_common", None)


@pytest.fixture
def content():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_measurements_run_and_go_on_where_they_stopped(load, tmp_path, capsys):
    out = tmp_path / "tutorial.json"
    tutorial = load("tutorial")
    assert tutorial.main(["--smoke", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert {run["arm"] for run in content["runs"].values()} == {"watched", "head", "network"}
    for run in content["runs"].values():
        assert len(run["curves"]["test_accuracy"]) in (2, 3)
        if run["arm"] == "watched":
            assert run["moments"][0]["by_lr"]["factor"] == [1 / 16, 1 / 4, 1, 4]
        else:
            assert max(run["steps"]["given_weight"]) > 0
    capsys.readouterr()
    del content["runs"][next(iter(content["runs"]))]
    out.write_text(json.dumps(content))
    assert tutorial.main(["--smoke", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count(" in ") == 1  # one line per run that was missing


def test_stretches_are_means(load):
    table = {"step": list(range(200)), "harmed_before": [float(k) for k in range(200)]}
    found = load("tutorial").binned(table)
    assert len(found["step"]) == 50
    assert found["harmed_before"] == found["step"] == [1.5 + 4 * k for k in range(50)]


def test_every_table_of_the_page_comes_from_the_results(load, content):
    page = load("tutorial_page")
    made = page.tables(page.Results(content))
    for name, text in made.items():
        assert text in PAGE, f"the table {name!r} is another one; run benchmarks/tutorial_page.py"
    assert len(re.findall(r"^\|[ :|-]+\|$", PAGE, re.MULTILINE)) == len(made)


def test_every_picture_is_drawn_and_shown(load, content, tmp_path):
    page = load("tutorial_page")
    drawn = page.pictures(page.Results(content))
    shown = set(re.findall(r"images/tutorial-([\w-]+)\.png", PAGE))
    assert shown == set(drawn)
    for name in shown:
        assert (ROOT / "docs" / "images" / f"tutorial-{name}.png").stat().st_size > 5000
    assert all(re.findall(r"!\[(.*?)\]", PAGE))  # in words, for those who cannot see it


def test_the_page_names_machine_and_seeds(content):
    about = content["environment"]
    for what in ("torch", "python", "cpu"):
        assert str(about[what]) in PAGE
    assert about["command"] in PAGE
    assert "work" not in about["command"]
