"""Entry point of the command `primum`.

It stands outside the package so that `primum --help` does not import torch: the commands themselves
are in `primum.experiments`, imported once one of them is chosen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    "demo": "train two small models with and without primum and write a report",
    "compare": "train with and without primum, and with controls, over seeds; resumable",
    "reproduce": "a table or figure of the paper, its values beside ours",
    "inspect": "measure what steps do to samples, in the whole network",
    "report": "one page that compares runs: verdict, table, plots, settings",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        top_level().parse_args(words)  # exits: help, version or an error
    try:
        from primum.experiments.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "primum":
            raise
        install = "pip install 'primum[experiments]'"
        print(f"primum: the package {error.name} is missing; {install}", file=sys.stderr)
        return 1
    return run(words)


def top_level() -> argparse.ArgumentParser:
    """The parser without the options of the commands."""
    parser = argparse.ArgumentParser(
        prog="primum",
        description="Reduce the harm an optimizer step does to samples of its own batch.",
    )
    parser.add_argument("--version", action="version", version=f"primum {version('primum')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
