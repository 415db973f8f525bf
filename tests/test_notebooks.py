"""The notebooks run from top to bottom, and are committed with what they printed and plotted."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["image_classifier", "language_model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds instead of minutes, with the code of this tree."""
    source = str(ROOT / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PRIMUM_SMOKE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel brings the inline one
    notebook = read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert [o for o in outputs if "image/png" in o.get("data", {})]
    assert not [o for o in outputs if o.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_it_imports(path: Path) -> None:
    first, *others = code(read(path))
    assert "%pip install" in first.source
    imported = {
        name
        for cell in others
        for name in re.findall(r"^(?:from|import) (\w+)", cell.source, flags=re.MULTILINE)
    }
    offered = set(re.findall(r': "(\w+)"', first.source))
    brought = {"torch"} | ({"scipy"} if "sklearn" in offered else set())
    assert "primum" in offered
    assert imported - set(sys.stdlib_module_names) <= offered | brought


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_full_output(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert "image/png" in str([o.get("data", {}).keys() for o in cells[-1].outputs])
    text = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "primum" in text
    assert str(Path.home()) not in path.read_text()
