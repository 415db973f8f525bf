"""Entry point of the command `primum`: works where the extra `experiments` is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import primum


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. The version needs no other package."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"primum {primum.__version__}")
        return 0
    try:
        from primum.experiments.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "primum":
            raise
        print(
            f"primum: the package {error.name} is missing; pip install 'primum[experiments]'",
            file=sys.stderr,
        )
        return 1
    return run(words)
