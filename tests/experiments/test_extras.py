"""What is said of packages that are missing, and that the extra brings them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from primum.experiments.extras import PACKAGES, explain

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}  # where the package index has others


def test_only_packages_of_the_extra_are_explained() -> None:
    found = explain(ModuleNotFoundError(name="sklearn.datasets"))
    assert found == "the package sklearn is missing; pip install 'primum[experiments]'"
    assert explain(ModuleNotFoundError(name="primum.nothing")) is None
    assert explain(ModuleNotFoundError()) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with 3.11")
def test_the_extra_has_them() -> None:
    import tomllib

    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    needs = extras["experiments"] + extras["diagnostics"]
    assert "primum[diagnostics]" in needs
    for package in PACKAGES:
        name = NAMES.get(package, package)
        assert any(need.startswith((f"{name}>", f"{name}[")) for need in needs), package
