"""Tests of the core against the oldest and the newest torch, each in an environment of its own.

    python -m nox --list
    python -m nox --session tests_oldest

An environment with torch takes several gigabytes, so plain `nox` runs nothing. `make test` runs
every test at the pinned versions and does not need this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

OLDEST = "2.8.0"  # the oldest torch in pyproject.toml
NIGHTLY = "TORCH_NIGHTLY_INDEX"  # names the index of nightly builds, as PyTorch publishes it
TOOLS = ["clarabel", "cvxpy", "hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist"]
ROOT = Path(__file__).parent

nox.options.sessions = []
nox.options.default_venv_backend = "venv"


def core_tests() -> list[str]:
    """Test files of the rooms of the core."""
    rooms = ("kernel", "hooks", "setup", "tokens", "distributed", "guards")
    found = [path for room in rooms for path in (ROOT / "tests" / room).glob("test_*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run(session: nox.Session) -> None:
    session.install("--no-deps", ".")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or core_tests()))


@nox.session(python="3.10")
def tests_oldest(session: nox.Session) -> None:
    """The oldest torch and the oldest Python that are supported."""
    session.install(f"torch=={OLDEST}", *TOOLS, "scikit-learn")
    run(session)


@nox.session(python="3.13")
def tests_newest(session: nox.Session) -> None:
    """The newest torch that the index offers for this Python."""
    session.install("--upgrade", "torch", *TOOLS, "scikit-learn")
    run(session)


@nox.session(python="3.13")
def tests_nightly(session: nox.Session) -> None:
    """Tonight's torch: a look ahead, allowed to fail."""
    index = os.environ.get(NIGHTLY)
    if not index:
        session.error(f"set {NIGHTLY} to the address of PyTorch's index of nightly builds")
    session.install(*TOOLS, "scikit-learn")
    session.install("--pre", "--upgrade", "torch", "--index-url", str(index))
    run(session)
