"""The package as a whole: its names, what it imports, what it ships."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import primum

SOURCE = Path(primum.__file__).parent
ROOT = Path(__file__).parent.parent

# Imports never point up: a file may import those before it alone. Files on a line are one storey.
ORDER = [
    ["bypass", "effect", "fallback", "rules", "warn", "widths"],
    ["compat"],
    ["hook", "find", "ranks", "steps", "rescale", "dryrun", "refused"],
    ["monitor"],
    ["capture"],
    ["output_check", "explicit"],
    ["update"],
    ["gram", "checks"],
    ["problem", "sketch"],
    ["solve"],
    ["report", "recipe"],
    ["pipeline", "summary"],
    ["rows", "ways"],
    ["shards", "skips", "positions"],
    ["distributed"],
    ["weighing"],
    ["reducer"],
    ["attach"],
    ["__init__"],
]
NEVER = {"paper", "diagnostics", "integrations", "experiments"}


def core() -> list[str]:
    return sorted(path.stem for path in SOURCE.glob("*.py"))


def imported(name: str) -> tuple[set[str], set[str]]:
    """Modules of the core, and other top-level packages, that a file imports anywhere in it."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the order"
            assert node.module is not None
            names = [node.module]
            if node.module == "primum":
                names = [f"primum.{alias.name}" for alias in node.names]
        else:
            continue
        for full in names:
            top, _, rest = full.partition(".")
            if top == "primum":
                ours.add(rest.split(".")[0])
            else:
                others.add(top)
    return ours, others


def test_public_names() -> None:
    public = {n for n in vars(primum) if not n.startswith("_")}
    modules = {n for n in public if f"primum.{n}" in sys.modules}
    # `attach` and `solve` are modules by name, and the functions of that name are what one gets.
    assert public - modules | {"attach", "solve"} == set(primum.__all__)
    assert callable(primum.attach)
    assert callable(primum.solve)
    assert primum.__all__ == sorted(primum.__all__)
    assert len(primum.__all__) <= 10
    for name in primum.__all__:
        assert getattr(primum, name).__doc__


def test_a_name_stands_for_one_module() -> None:
    names = [path.stem for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_every_file_has_its_storey() -> None:
    assert sorted(name for storey in ORDER for name in storey) == core()


@pytest.mark.parametrize("name", core())
def test_imports_never_point_up(name: str) -> None:
    storey = next(i for i, names in enumerate(ORDER) if name in names)
    below = {each for names in ORDER[:storey] for each in names}
    ours, others = imported(name)
    assert not ours & NEVER
    assert ours <= below
    assert others - set(sys.stdlib_module_names) <= {"torch"}


def test_importing_it_imports_torch_alone() -> None:
    """Of third-party packages, only what torch itself brings along."""
    script = """
import sys, torch, torch.nn, torch.optim
before = set(sys.modules)
import primum
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    new = done.stdout.split()
    assert "primum.attach" in new
    assert not [n for n in new if n.startswith("primum.") and n.split(".")[1] in NEVER]
    others = {n.split(".")[0] for n in new} - {"primum", "torch"}
    assert not others - set(sys.stdlib_module_names)
    assert "torch._dynamo" not in new  # as slow to import as the rest of torch


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", primum.__version__)
    assert importlib.metadata.version("primum") == primum.__version__
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'path = "src/primum/__init__.py"' in pyproject  # where the build reads it from
    assert re.search(r'^dynamic = \["version"\]', pyproject, re.MULTILINE)


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").exists()


def test_needs_torch_alone() -> None:
    needed = importlib.metadata.requires("primum") or []
    assert [n for n in needed if "extra ==" not in n] == ["torch>=2.8"]


def test_the_map_in_the_docstring_names_real_files() -> None:
    named = re.findall(r"^ +(\w+)\.py ", primum.__doc__ or "", re.MULTILINE)
    assert len(named) >= 8
    assert set(named) <= set(core())
