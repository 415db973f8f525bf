"""Errors that a user can fix, reported as one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGES = (
    *("PIL", "datasets", "jinja2", "matplotlib", "numpy", "pandas", "scipy"),
    *("sklearn", "tensorboard", "torchjd", "tqdm"),
)
INSTALL = "pip install '.[lab]'"


class UserError(ValueError):
    """A wrong setting, file or folder. The message has the value and a way to fix it."""


@contextmanager
def reading(path: Path | str, way_out: str = "") -> Iterator[None]:
    """A block that reads a file from anywhere: whatever fails is one line that names the file.

    A file that we did not write, or that was damaged, fails in more ways than can be listed.
    """
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines()
        why = lines[0] if lines else ""
        if not isinstance(error, UserError | OSError) or not why:
            why = f"{type(error).__name__}{': ' * bool(why)}{why}"
        raise UserError(f"{path} cannot be read: {why}{'; ' * bool(way_out)}{way_out}") from error


def check_least(
    settings: object, least: Mapping[str, int], error: type[UserError] = UserError
) -> None:
    """Raise if one of these settings is below its bound; None is allowed."""
    for what, bound in least.items():
        value = getattr(settings, what)
        if value is not None and value < bound:
            raise error(f"{what} must be >= {bound}, got {value}")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """How to install the optional package of a failed import; None for other modules."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return None
    return f"the package {package} is missing; {INSTALL}"


@contextmanager
def torchjd_for(arm: str) -> Iterator[None]:
    """A block that imports TorchJD, and its solver, for an arm."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{arm} needs torchjd and quadprog ({error}); {INSTALL}") from error
