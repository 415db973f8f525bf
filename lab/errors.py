"""Errors that a user can fix, reported as one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PACKAGES = (
    *("PIL", "datasets", "jinja2", "matplotlib", "numpy", "pandas", "scipy"),
    *("sklearn", "tensorboard", "torchjd", "tqdm"),
)
INSTALL = "pip install '.[lab]'"


class UserError(ValueError):
    """A wrong setting, file or folder. The message has the value and a way to fix it."""


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
