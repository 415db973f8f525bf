"""The results page: its runs are committed, its tables and pictures come from them."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNS = sorted((ROOT / "results" / "runs").glob("*.json"))
PAGE = ROOT / "docs" / "results.md"
CLAIMS = ROOT / "docs" / "claims.md"
MODULES = ("studies", "studies_page", "_study_figures", "_common")


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark as its own directory sees it, as `python benchmarks/...` would."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in MODULES:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_studies_run_and_go_on_where_they_stopped(load, tmp_path, capsys):
    studies = load("studies")
    assert studies.main(["--smoke", "--only", "vit", "upgrad"]) == 0
    study = studies.smoke(studies.STUDIES["long-sgd"])
    arguments = studies.argparse.Namespace(workers=1, data_dir=None, cache_dir=None)
    studies.run_study(study, arguments, tmp_path)
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert len(files) == len(study.runs()) == 5
    files[0].unlink()
    capsys.readouterr()
    studies.run_study(study, arguments, tmp_path)
    told = capsys.readouterr()
    assert "1 run(s) to make" in told.out + told.err
    assert sorted((tmp_path / "runs").glob("*.json")) == files


def test_every_committed_run_belongs_to_a_study(load):
    studies = load("studies")
    names = {
        path.name
        for study in studies.STUDIES.values()
        for run in study.runs()
        if (path := studies.Store(studies.RESULTS).run_path(run)).exists()
    }
    assert names == {path.name for path in RUNS}
    assert names


def test_runs_are_finished_say_how_they_were_made_and_name_no_folder():
    for path in RUNS:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        assert content["complete"], path.name
        assert content["command"].startswith("primum compare "), path.name
        assert {"torch", "python", "processor"} <= content["environment"].keys(), path.name
        assert content["final"]["fallbacks"] == 0, path.name
        assert not re.search(r"/(home|tmp|work|root|usr)\b", text), path.name


def test_what_is_listed_is_what_there_is(load, capsys):
    studies = load("studies")
    assert studies.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for study in studies.STUDIES.values():
        assert f"{study.name}: " in listed
        assert study.command in listed


def test_every_table_of_the_page_comes_from_the_runs(load, tmp_path):
    page = load("studies_page")
    assert page.main(["--check"]) == 0, "run python benchmarks/studies_page.py"
    assert set(page.PAGES) == {PAGE, CLAIMS}
    text = "".join(each.read_text(encoding="utf-8") for each in page.PAGES)
    assert sorted(re.findall(r"<!-- table ([\w-]+) -->", text)) == sorted(page.MAKERS)
    other = tmp_path / "results.md"
    other.write_text(PAGE.read_text(encoding="utf-8").replace(" ± ", " ~ "), encoding="utf-8")
    assert page.main(["--check", "--pages", str(other)]) == 1


# In the words of the page, but not of these runs: the paper's accuracies, radii and the like.
ELSEWHERE = {"89.22", "89.00", "95"}
DECIMAL = re.compile(r"(?<![\w./])\d+\.\d+(?![\w/])")


def test_no_number_in_the_words_is_missing_from_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- table [\w-]+ -->.*?<!-- end -->", page, re.DOTALL)
    words = re.sub(r"<!-- table [\w-]+ -->.*?<!-- end -->", "", page, flags=re.DOTALL)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words += next(part for part in readme.split("\n\n") if part.startswith("**On CIFAR-10**"))
    known = set(DECIMAL.findall("\n".join(blocks)))
    said = set(DECIMAL.findall(words)) - ELSEWHERE
    assert len(said) > 5
    assert said <= known, sorted(said - known)
    intervals = set(re.findall(r"\d+\.\d+ ± \d+\.\d+", words))
    assert intervals
    assert all(each in "\n".join(blocks) for each in intervals), sorted(intervals)


def test_claims_of_the_paper_say_how_they_were_judged():
    outcomes = sorted((ROOT / "results" / "reproduce" / "small").glob("*.json"))
    for path in outcomes:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|tmp|work|root|usr)\b", text), path.name
    judged = [json.loads(path.read_text(encoding="utf-8")) for path in outcomes]
    judged = [each for each in judged if each.get("format") == "primum-reproduction-1"]
    assert judged
    for outcome in judged:
        assert outcome["command"].startswith(f"primum reproduce {outcome['name']} ")
        assert " --scale small " in outcome["command"]
        assert outcome["findings"], outcome["name"]


def test_table_1_is_counted_right():
    path = ROOT / "results" / "reproduce" / "small" / "table1.json"
    gains: dict[str, list[float]] = {}
    for finding in json.loads(path.read_text(encoding="utf-8"))["findings"]:
        gain = float(re.search(r"\(([+-][\d.]+)", finding["ours"])[1])
        gains.setdefault(finding["claim"].removesuffix(", primum"), []).append(gain)
    counts = [sum(paper > 0 for paper, _ in gains.values())]
    counts += [sum(own > 0 for _, own in gains.values())]
    counts += [sum(own > paper for paper, own in gains.values())]
    words = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert re.findall(rf"(\d+) of {len(gains)}[ ,)]", words.split("Table 1 was made")[1])[:3] == [
        str(count) for count in counts
    ]


def test_how_often_the_papers_solver_stays_below_the_optimum():
    short = []
    for path in (ROOT / "results" / "reproduce" / "small").glob("solvers-*.json"):
        for group in json.loads(path.read_text(encoding="utf-8"))["groups"]:
            arms = [problem["arms"] for problem in group["problems"]]
            short += [
                each["Clarabel"]["removed"] - each["paper 2000"]["removed"]
                for each in arms
                if "Clarabel" in each
            ]
    told = f"in {sum(gap > 0.005 for gap in short)} of the {len(short)} problems"
    assert told in " ".join(CLAIMS.read_text(encoding="utf-8").split())


def test_every_picture_is_drawn_and_shown(load, tmp_path):
    page = load("studies_page")
    shown = set(re.findall(r"images/(results-[\w-]+\.png)", PAGE.read_text(encoding="utf-8")))
    copy = tmp_path / "results.md"
    shutil.copy(PAGE, copy)
    assert page.main(["--pages", str(copy), "--images", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == shown
    for name in shown:
        assert (ROOT / "docs" / "images" / name).stat().st_size > 5000
    assert all(re.findall(r"!\[(.*?)\]", PAGE.read_text(encoding="utf-8")))


def test_differences_are_over_common_seeds(load):
    page = load("studies_page")
    runs = {
        arm: [
            page.RunRecord("n", arm, seed, final={"test_accuracy": value})
            for seed, value in enumerate(values)
        ]
        for arm, values in {"base": (0.5, 0.6, 0.9), "primum": (0.6, 0.8)}.items()
    }
    change = page.against(runs["primum"], runs["base"])
    assert change.welch.count == 2
    assert change.paired.mean == pytest.approx(15)
    assert page.against(runs["primum"], []) is None
