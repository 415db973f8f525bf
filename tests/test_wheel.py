"""Wheel and sdist as they would be published, the wheel in an environment with torch alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import primum

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "primum"
# Of the tree, what an sdist holds: enough to build, lint and test.
FOLDERS = ("src", "lab", "tests", "docs", "results", "examples", ".ci", ".github")
SKIPPED = {"__pycache__", ".ipynb_checkpoints", ".hypothesis"}


def clean() -> dict[str, str]:
    """The environment variables, without those that lead to this tree and its packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that succeeds."""
    done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not SKIPPED & set(path.parts)
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel made of it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def torch_and_its_needs() -> set[str]:
    """Names of distributions: torch, what it requires, and so on."""
    found: set[str] = set()
    pending = ["torch"]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                pending.append(need.name)
    return found


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to the torch of this one: nothing to download."""
    folder = tmp_path_factory.mktemp("empty")
    shared = folder / "torch"
    shared.mkdir()
    for name in torch_and_its_needs():
        distribution = importlib.metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            link = shared / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(f"{shared}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, "--no-index", "--no-compile", built[1], cwd=folder)
    return python


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    info = f"primum-{primum.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == files(ROOT / "src")
    assert f"{info}licenses/LICENSE" in names


def test_the_sdist_holds_the_tree(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    for folder in FOLDERS:
        expected = {f"{folder}/{name}" for name in files(ROOT / folder)}
        assert {name for name in names if name.startswith(f"{folder}/")} == expected
    others = {name for name in names if not name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    assert {name for name in others if "/" in name} == set()
    assert others >= {"LICENSE", "README.md", "CITATION.cff", "pyproject.toml", "Makefile"}


def test_it_imports_where_there_is_torch_alone(environment: Path, tmp_path: Path) -> None:
    """The core, the paper's recipe and `log_to`."""
    names = sorted(f"primum.{path.stem}" for path in SOURCE.glob("[a-z]*.py"))
    names += ["primum.paper", "primum.integrations"]
    script = f"""
import importlib.util, {", ".join(names)}
print(primum.__version__, primum.__file__)
print(*[n for n in ("pytest", "sklearn", "matplotlib", "tqdm") if importlib.util.find_spec(n)])
"""
    first, others = run(environment, "-c", script, cwd=tmp_path).split("\n")[:2]
    version, path = first.split()
    assert version == primum.__version__
    assert Path(path).is_relative_to(environment.parent.parent)
    assert others == ""


def test_the_command_prints_its_version(environment: Path, tmp_path: Path) -> None:
    printed = run(environment.with_name("primum"), "--version", cwd=tmp_path)
    assert printed == f"primum {primum.__version__}\n"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("demo", 1, "in a clone of the repository: pip install '.[demo]'\n"),
        ("compare", 2, "python -m lab compare\n"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    environment: Path, tmp_path: Path, command: str, code: int, said: str
) -> None:
    done = subprocess.run(
        [environment.with_name("primum"), command],
        cwd=tmp_path,
        env=clean(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr


def test_the_snippet_of_the_readme_runs(environment: Path, tmp_path: Path) -> None:
    """Torch alone is enough for it."""
    text = (ROOT / "README.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert any("primum.attach(" in snippet for snippet in snippets)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(snippets))
    # torch itself warns where numpy is missing
    ours = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    run(environment, *ours, script, cwd=tmp_path)
