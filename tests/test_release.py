"""Files that have to agree before a release: versions, workflows, sessions, citation."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import primum

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(
        (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    )
    return loaded


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_main_job_calls_one_command() -> None:
    job = workflow("tests")["jobs"]["all"]
    assert commands(job) == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert ".ci/run" in commands(workflow("publish")["jobs"]["build"])


def test_every_python_that_is_claimed_is_tested() -> None:
    claimed = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT))
    jobs = workflow("tests")["jobs"]
    tested = set(jobs["all"]["strategy"]["matrix"]["python"])
    tested |= {each["python"] for each in jobs["torch"]["strategy"]["matrix"]["include"]}
    assert tested == claimed


def test_oldest_and_newest_torch_are_tested(noxfile: ModuleType) -> None:
    lowest = re.search(r'^dependencies = \["torch>=([\d.]+)"\]', PYPROJECT, flags=re.MULTILINE)
    assert lowest is not None
    assert noxfile.OLDEST.startswith(lowest[1] + ".")
    include = workflow("tests")["jobs"]["torch"]["strategy"]["matrix"]["include"]
    may_fail = {each["session"]: each["may-fail"] for each in include}
    assert may_fail == {"tests_oldest": False, "tests_newest": False, "tests_nightly": True}
    for session in may_fail:
        assert callable(getattr(noxfile, session))


def test_the_sessions_run_the_core_alone(noxfile: ModuleType) -> None:
    names = noxfile.core_tests()
    assert {"tests/kernel/test_solve.py", "tests/distributed/test_over_ranks.py"} <= set(names)
    assert all((ROOT / name).is_file() for name in names)
    assert not [name for name in names if re.search("docs|benchmarks|example|notebook", name)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+) *(#.*)?", path.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r"# v\d+(\.\d+)+", comment)


def test_only_the_publishing_job_may_ask_for_an_identity() -> None:
    jobs = workflow("publish")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert not commands(jobs["publish"])  # builds nothing: it uploads what the other job built
    assert jobs["build"]["permissions"] == {"contents": "read"}


def test_the_citation_has_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == primum.__version__
    paper = citation["preferred-citation"]
    assert paper["title"] == "Reducing Per-Sample Interference in Stochastic Optimization"
    assert [author["family-names"] for author in paper["authors"]] == ["Avranas"]


def test_the_hooks_before_a_commit_are_the_tools_of_make() -> None:
    """Each runs something that the Makefile runs too."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        if hook["entry"].startswith("make "):
            assert f"\n{hook['entry'].split()[1]}: " in makefile
        else:
            program, *words = hook["entry"].split()
            assert program == ".venv/bin/python"
            command = " ".join(word for word in words if word != "--force-exclude")
            assert f"$(BIN)/python {command}" in makefile
