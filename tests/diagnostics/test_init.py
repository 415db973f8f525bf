"""The package: its names, its examples, what it imports."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import primum
from primum import diagnostics

FOLDER = Path(diagnostics.__file__).parent
ORDER = [
    ["trees", "record", "shift"],
    ["probe"],
    ["gradients", "meter"],
    ["layers", "head"],
    ["interference"],
    ["depth", "weights", "real"],
    ["compare"],
    ["__init__"],
]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("storey", range(len(ORDER)))
def test_imports_never_point_up(storey):
    below = {name for names in ORDER[:storey] for name in names}
    for name in ORDER[storey]:
        modules = set(imported(FOLDER / f"{name}.py"))
        ours = {m.rpartition(".")[2] for m in modules if m.startswith("primum.diagnostics")}
        assert ours <= below, name
        others = {m.partition(".")[0] for m in modules} - {"primum"}
        assert others - set(sys.stdlib_module_names) <= {"torch", "numpy"}, name


def test_every_numeric_file_has_its_storey():
    named = {name for names in ORDER for name in names}
    assert named <= {path.stem for path in FOLDER.glob("*.py")}


def test_importing_it_draws_nothing():
    script = "import sys, primum.diagnostics; print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", diagnostics.__all__)
def test_public_names_are_explained(name):
    assert getattr(diagnostics, name).__doc__


@pytest.mark.parametrize("name", ["Probe", "InterferenceMeter"])
def test_examples(name):
    names = {each: getattr(diagnostics, each) for each in diagnostics.__all__}
    names |= {"torch": torch, "nn": nn, "primum": primum}
    (example,) = doctest.DocTestFinder(recurse=False).find(names[name], name, globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
