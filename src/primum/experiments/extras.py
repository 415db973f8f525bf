"""Packages that the core does without, and how to get them."""

from __future__ import annotations

import sys

PACKAGES = (
    *("PIL", "datasets", "matplotlib", "numpy", "scipy"),
    *("sklearn", "tensorboard", "torchjd", "tqdm"),
)
INSTALL = "pip install 'primum[experiments]'"


def explain(error: ModuleNotFoundError) -> str | None:
    """What to do about an import that failed for want of one of them; None if it is another's."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return None
    return f"the package {package} is missing; {INSTALL}"


def refuse(who: str, error: ModuleNotFoundError) -> int:
    """Say so on behalf of a command, whose exit code is returned; what is another's is raised."""
    told = explain(error)
    if told is None:
        raise error
    print(f"{who}: {told}", file=sys.stderr)
    return 1
