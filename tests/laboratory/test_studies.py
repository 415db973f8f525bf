"""The studies: their runs are committed, and the pages' tables and plots come from them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from lab import language_page, studies
from lab.arms import Arm
from lab.default_radius import chosen
from lab.errors import UserError
from lab.job import Place, train_run
from lab.pages import ALL, CLIENTS, make_pages
from lab.pages import main as update_pages
from lab.runs import read_index, read_runs, read_table
from lab.settings import Matched, RunSettings
from lab.speedrun import TUNING_SEED
from lab.store import Store
from lab.studies import STUDIES, main, smoke
from lab.study_results import Results
from primum.kernel.recipe import RADIUS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
INDEX = read_index(RESULTS / "studies.json")
MARKS = re.compile(r"<!-- table ([\w-]+) -->")
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
CLAIMS = (DOCS / "claims.md").read_text(encoding="utf-8")
LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(RESULTS)


def test_studies_run_are_packed_and_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: smoke(STUDIES[name]) for name in ("upgrad", "tutorial", "language-char")}
    monkeypatch.setattr(studies, "STUDIES", chosen)
    words = ["--out", str(tmp_path), "--only", *chosen]
    assert main(words) == 0
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    tables = [f"{name}.jsonl.gz" for name in ("language-char", "tutorial", "upgrad")]
    assert files == [tables[0], "studies.json", *tables[1:]]
    runs = read_runs([tmp_path])
    assert len(runs) == sum(len(study.runs()) for study in chosen.values()) == 11
    arms = {run.arm.partition("@")[0] for run in runs}
    assert arms >= {"base", "primum", "upgrad"}
    capsys.readouterr()
    assert main(words) == 0
    assert "to do" not in capsys.readouterr().err  # resumed from the tables
    (tmp_path / "upgrad.jsonl.gz").unlink()
    assert main([*words[:2], "--only", "upgrad"]) == 0
    assert [(r.arm, r.curves["test_loss"]) for r in read_runs([tmp_path])] == [
        (r.arm, r.curves["test_loss"]) for r in runs
    ]


def test_finished_runs_of_an_unfinished_study_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = smoke(STUDIES["speedrun-tuning"])
    monkeypatch.setattr(studies, "STUDIES", {study.name: study})
    store = Store(tmp_path)
    store.prepare()
    run = study.runs()[0]
    done = train_run(run, Matched(), Place(store))
    assert main(["--out", str(tmp_path), "--pack"]) == 0
    assert not list((tmp_path / "runs").iterdir())
    assert [each.arm_settings["key"] for each in read_runs([tmp_path])] == [run.key]
    assert Store(tmp_path).find(run) == done


def test_every_study_of_language_has_its_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole plan in a small size, with pages that are made of it and checked."""
    chosen = {n: smoke(s) for n, s in STUDIES.items() if s.page == "language"}
    monkeypatch.setattr(studies, "STUDIES", chosen)
    assert main(["--out", str(tmp_path), "--only", "language-char", "language-rates-char"]) == 0
    found = Results(tmp_path)
    assert {name for name, runs in found.runs.items() if runs} >= {"language-char"}
    table = language_page.MAKERS["language-char"](found)
    assert "| primum, radius 0.1 | 1 |" in table
    assert "| lr-matched | 1 |" in table
    assert not found.runs["language-bound"]  # it shares runs of base and primum, and has no other
    assert "| `language-bound` |" in language_page.MAKERS["language-not-run"](found)
    assert "language-rates-char" in language_page.language_plots(found)


def test_every_committed_run_belongs_to_a_study() -> None:
    stored = Store(RESULTS).tables
    assert len(stored) >= 1351
    images = [run for run in stored.values() if "task" not in run.settings]
    assert len(images) >= 533 + 28  # none of the first ones is lost
    found = {path.name for path in RESULTS.glob("*")}
    assert found <= {
        "README.md",
        "reproduce",
        "studies.json",
        *(f"{name}.jsonl.gz" for name in INDEX),
    }
    for name, study in STUDIES.items():
        keys = {run.key for run in study.runs()}
        if f"{name}.jsonl.gz" in found:  # also has runs of arms that are closed
            keys |= {run.arm_settings["key"] for run in read_table(RESULTS / f"{name}.jsonl.gz")}
        assert INDEX[name] == {
            "name": name,
            "page": study.page,
            "question": study.question,
            "command": study.command,
            "planned": len(keys),
        }, "run the studies with --pack"
        waiting = f"<!-- table {name} -->\n\nNot run yet.\n" in PAGE + LANGUAGE
        assert waiting == (f"{name}.jsonl.gz" not in found), name


def test_stored_runs_are_found_and_named_whatever_the_default_radius_is(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RADIUS, "sample", 0.3)
    assert Arm("primum").radius == 0.3
    assert Arm("paper").radius == 0.2
    store = Store(RESULTS)
    for name, study in STUDIES.items():
        named = {run.arm_settings["key"]: run.arm for run in results.runs[name]}
        found = study.found(store) if named else []
        assert found or not named, name
        assert all(run.arm == named[run.arm_settings["key"]] for run in found), name
    controls = {run.arm for run in results.runs["controls-sgd"]}
    assert {"primum", "primum@radius=0.4", "permuted", "lr-matched"} <= controls


def test_the_default_radius_is_what_the_rule_chooses(results: Results) -> None:
    assert chosen(results.default_radius()) == RADIUS["sample"]


# Runs from before the laboratory had a folder of its own name its former place.
COMMANDS = ("python -m lab", "primum compare ", "python -m primum.experiments.studies")


def test_runs_are_finished_and_say_how_they_were_made() -> None:
    for key, run in Store(RESULTS).tables.items():
        assert run.complete, key
        assert run.command.startswith(COMMANDS)
        assert {"torch", "python"} <= run.environment.keys(), key
        assert run.commit, key
        diverged = run.final["test_loss"] is None  # a learning rate tried for base, too high
        assert diverged or run.final.get("fallbacks", 0) == 0, key
        assert not diverged or (run.arm == "base" and run.seed == TUNING_SEED), key


def test_no_stored_file_names_a_folder_of_a_machine() -> None:
    for path in RESULTS.rglob("*.gz"):
        text = gzip.decompress(path.read_bytes()).decode()
        assert not re.search(r"/(home|tmp|work|root|usr)/", text), path.name


def test_what_is_listed_is_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: " in listed
        assert study.command in listed


def test_every_table_of_the_pages_comes_from_stored_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No settings are made again to find a run, so a study whose code is gone keeps its tables."""

    def refuse(self: RunSettings) -> str:
        raise AssertionError("a page asked for the key of settings")

    monkeypatch.setattr(RunSettings, "key", property(refuse))
    assert update_pages(["--check"]) == 0, "run python -m lab.pages"
    found = {path.name: MARKS.findall(path.read_text()) for path in DOCS.glob("*.md")}
    assert found["clients.md"]
    mine = [n for page, names in found.items() for n in names if page != CLIENTS]
    mine += MARKS.findall((ROOT / "README.md").read_text())
    assert sorted(n for n in mine if not n.startswith("benchmarks-")) == sorted(ALL)

    page = tmp_path / "README.md"
    page.write_text("<!-- table spread -->\nold\n<!-- end -->\n", encoding="utf-8")
    assert make_pages(RESULTS, tmp_path, check=True) == 1
    assert "out of date: README.md" in capsys.readouterr().out
    assert "old" in page.read_text()
    page.write_text("<!-- table nonsense -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"README.md: there is no table named 'nonsense'"):
        make_pages(RESULTS, tmp_path, check=True)


def test_every_plot_is_drawn_and_shown(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table spread -->\nold\n<!-- end -->\n", encoding="utf-8")
    assert make_pages(RESULTS, tmp_path) == 0
    assert "old" not in page.read_text(encoding="utf-8")
    text = PAGE + LANGUAGE + (DOCS / "tutorial.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"images/((?:results|tutorial|language)-[\w-]+\.png)", text))
    assert {path.name for path in (tmp_path / "docs" / "images").glob("*.png")} == shown
    for name in shown:
        assert (DOCS / "images" / name).stat().st_size > 5000
    assert all(re.findall(r"!\[(.*?)\]", text))  # described in words


# In the text of the page, but not from these runs: the paper's accuracies, radii and the like.
ELSEWHERE = {"89.22", "89.00", "95", "47.94", "48.69", "56.37", "56.20"}
# In the text on language models: figures of the public script, of the example and of two runs
# that no study has, and settings.
FROM_ELSEWHERE = {
    *("4.721", "4.746", "4.690", "4.709", "4.383", "4.404", "1.11"),
    *("4.4", "0.9", "0.99", "0.01", "0.001"),
}
DECIMAL = re.compile(r"(?<![\w./])\d+\.\d+(?![\w/])")


def test_no_number_in_the_text_is_missing_from_the_tables() -> None:
    blocks = re.findall(r"<!-- table [\w-]+ -->.*?<!-- end -->", PAGE, re.DOTALL)
    words = re.sub(r"<!-- table [\w-]+ -->.*?<!-- end -->", "", PAGE, flags=re.DOTALL)
    known = set(DECIMAL.findall("\n".join(blocks)))
    said = set(DECIMAL.findall(words)) - ELSEWHERE
    assert len(said) > 5
    assert said <= known, sorted(said - known)
    intervals = set(re.findall(r"\d+\.\d+ ± \d+\.\d+", words))
    assert intervals
    assert all(each in "\n".join(blocks) for each in intervals), sorted(intervals)


def test_no_number_in_the_text_on_language_is_missing_from_the_tables() -> None:
    blocks = re.findall(r"<!-- table [\w-]+ -->.*?<!-- end -->", LANGUAGE, re.DOTALL)
    words = re.sub(r"<!-- table [\w-]+ -->.*?<!-- end -->", "", LANGUAGE, flags=re.DOTALL)
    words = re.sub(r"^```.*?^```", "", words, flags=re.MULTILINE | re.DOTALL)
    known = set(DECIMAL.findall("\n".join(blocks)))
    said = set(DECIMAL.findall(words)) - FROM_ELSEWHERE
    assert len(said) > 5
    assert said <= known, sorted(said - known)


def test_claims_say_how_they_were_judged(results: Results) -> None:
    assert [outcome.name for outcome in results.outcomes] == [
        *("table1", "figure1", "figure2", "multilayer", "gram", "gram-adamw")
    ]
    for outcome in results.outcomes:
        assert outcome.command.startswith(f"primum reproduce {outcome.name} ")
        assert " --scale small " in outcome.command
        assert outcome.findings, outcome.name


def test_table_1_is_counted_correctly(results: Results) -> None:
    gains: dict[str, list[float]] = {}
    for finding in results.outcomes[0].findings:
        found = re.search(r"\(([+-][\d.]+)", finding.ours)
        assert found is not None
        gains.setdefault(finding.claim.removesuffix(", primum"), []).append(float(found[1]))
    counts = [sum(paper > 0 for paper, _ in gains.values())]
    counts += [sum(own > 0 for _, own in gains.values())]
    counts += [sum(own > paper for paper, own in gains.values())]
    words = " ".join(PAGE.split())
    assert re.findall(rf"(\d+) of {len(gains)}[ ,)]", words.split("Table 1 was made")[1])[:3] == [
        str(count) for count in counts
    ]


def test_how_often_the_papers_solver_stays_below_the_optimum() -> None:
    path = RESULTS / "reproduce" / "small" / "measurements.json.gz"
    stored = json.loads(gzip.decompress(path.read_bytes()))["figure2"]["scripts"]
    short = [
        problem["arms"]["Clarabel"]["removed"] - problem["arms"]["paper 2000"]["removed"]
        for content in stored.values()
        for group in content["groups"]
        for problem in group["problems"]
        if "Clarabel" in problem["arms"]
    ]
    said = f"in {sum(gap > 0.005 for gap in short)} of the {len(short)} problems"
    assert said in " ".join(CLAIMS.split())
