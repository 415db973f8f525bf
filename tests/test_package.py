"""The package as a whole: its names, what it imports, what it ships."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import primum

SOURCE = Path(primum.__file__).parent
ROOT = Path(__file__).parent.parent

ROOMS = {"kernel", "hooks", "setup", "tokens", "distributed", "guards"}
LATER = {"paper", "diagnostics", "integrations", "cli", "demo"}  # the core loads them on demand


def modules(*folders: str) -> list[str]:
    """Paths of the core's modules, or of those in some folders."""
    found = [p for folder in folders or ROOMS for p in SOURCE.joinpath(folder).rglob("*.py")]
    found += [] if folders else SOURCE.glob("*.py")
    return sorted(path.relative_to(SOURCE).as_posix() for path in found)


def imported(name: str, *, at_the_top: bool = False) -> set[str]:
    """Full names of the modules that a file imports: anywhere, or when it is loaded."""
    tree = ast.parse((SOURCE / name).read_text())
    found: set[str] = set()
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            assert node.module is not None
            found |= {node.module}
            if node.module == "primum":
                found |= {f"primum.{alias.name}" for alias in node.names}
    return found


def test_public_names() -> None:
    public = {n for n in vars(primum) if not n.startswith("_")}
    assert public - {n for n in public if f"primum.{n}" in sys.modules} == set(primum.__all__)
    assert primum.__all__ == sorted(primum.__all__)
    for name in primum.__all__:
        assert getattr(primum, name).__doc__


@pytest.mark.parametrize("name", modules("kernel"))
def test_the_kernel_imports_no_other_room(name: str) -> None:
    for full in imported(name):
        allowed = full == "torch" or full.startswith(("torch.", "primum.kernel."))
        assert allowed or full.partition(".")[0] in sys.stdlib_module_names, full


@pytest.mark.parametrize("name", modules())
def test_the_core_needs_torch_alone(name: str) -> None:
    for full in imported(name, at_the_top=True):
        top, _, rest = full.partition(".")
        assert top in {"torch", "primum"} | sys.stdlib_module_names, full
        assert top != "primum" or rest.split(".")[0] not in LATER, full


def test_nothing_imports_the_laboratory() -> None:
    """Or tests, benchmarks and the like, none of which are in the wheel."""
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        tops = {full.partition(".")[0] for full in imported(name)}
        assert not tops & {"lab", "laboratory", "examples"}, name


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
    assert "primum.kernel.engine" in new
    assert not [n for n in new if n.startswith("primum.") and n.split(".")[1] in LATER]
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


def test_the_map_in_the_docstring_names_the_rooms() -> None:
    named = set(re.findall(r"^ +(\w+)/ ", primum.__doc__ or "", re.MULTILINE))
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert named >= ROOMS
    assert named == there
