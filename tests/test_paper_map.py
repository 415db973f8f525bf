"""docs/paper.md is complete, and whatever it names exists."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
ERRATA = "tests/paper/test_errata.py"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not set(line) <= set("|- ")
]
NUMBERED = {"Eq. ": 20, "Algorithm ": 8, "Pseudocode ": 3, "Table ": 5, "Figure ": 11}


@cache
def functions_of(path: str) -> frozenset[str]:
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        nodes = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
        found |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    return frozenset(found)


def resolve(name: str) -> object:
    """The object of a dotted name: the longest importable module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("kind", NUMBERED)
def test_every_number_of_the_paper_has_one_row(kind):
    rows = [row for row in ROWS if re.fullmatch(re.escape(kind) + r"\d+", row[0])]
    assert [row[0] for row in rows] == [f"{kind}{n}" for n in range(1, NUMBERED[kind] + 1)]
    for row in rows:
        assert row[1]
        assert "`" in row[2] or row[2] == "not yet", f"{row[0]} leads nowhere"
        if kind in ("Algorithm ", "Pseudocode "):
            assert "::test_" in row[3]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(primum\.[\w.]+)`", PAGE))))
def test_every_name_exists(name):
    resolve(name)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"tests/[\w/]+\.py::\w+", PAGE))))
def test_every_test_exists(named):
    path, test = named.split("::")
    assert test in functions_of(path)


def test_every_erratum_is_listed_and_shown():
    shown = {name for name in functions_of(ERRATA) if name.startswith("test_erratum_")}
    listed = [name for row in ROWS for name in re.findall(r"^`(test_erratum_\w+)`$", row[2])]
    assert sorted(listed) == sorted(shown)
    assert len(shown) > 20


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:tests|lab|docs|src)/[\w/]+\.\w+", PAGE)))
)
def test_every_file_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m (lab\.bench[^`\n]+)", PAGE))))
def test_every_command_exists_with_its_options(command):
    script, *arguments = command.split()
    shared = (ROOT / "lab" / "bench" / "_common.py").read_text()  # --out and --quick
    source = (ROOT / f"{script.replace('.', '/')}.py").read_text() + shared
    for option in arguments:
        if option.startswith("--"):
            assert f'"{option}"' in source


def test_every_setting_is_in_the_table_of_constants():
    from primum.paper import PaperSettings

    named = set(re.findall(r"`primum\.paper\.PaperSettings\.(\w+)`", PAGE))
    assert named == set(PaperSettings.__dataclass_fields__)
