"""Errors that a user can fix, each reported as one line."""

from __future__ import annotations

PACKAGES = (
    *("PIL", "datasets", "jinja2", "matplotlib", "numpy", "pandas", "scipy"),
    *("sklearn", "tensorboard", "torchjd", "tqdm"),
)
INSTALL = "pip install 'primum[experiments]'"


class UserError(ValueError):
    """A wrong setting, file or folder. The message names the value and says what to do."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """How to install the optional package behind a failed import; None for any other module."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return None
    return f"the package {package} is missing; {INSTALL}"
