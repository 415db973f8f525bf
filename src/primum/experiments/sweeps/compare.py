"""`primum compare`: arms of your choice, on a model and data of your choice, over seeds."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_compare(subcommands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    from primum.experiments.sweeps.options import add_arms, add_place, add_settings

    compare = subcommands.add_parser(
        "compare",
        help="train with and without, and with controls, over seeds; resumes where it stopped",
        description="Train a model with several arms over several seeds, one file per run, then "
        "print a table with intervals and tests against base and write summary.json, summary.md "
        "and report.html. Finished runs are skipped and cut ones taken up: the same command goes "
        "on where it stopped.",
    )
    add_arms(compare)
    add_place(compare, "runs/compare")
    add_settings(compare)
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from primum.experiments.sweeps import options
    from primum.experiments.sweeps.command import guarded, run_comparison

    def work() -> int:
        return run_comparison(
            options.points(arguments),
            options.arms(arguments),
            range(arguments.first_seed, arguments.first_seed + arguments.seeds),
            arguments,
            command=typed_command(arguments.typed),
        )

    return guarded("compare", arguments.out, work)


def typed_command(typed: Sequence[str]) -> str:
    """What was typed, without folders of this machine."""
    words = list(typed)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--data-dir", "--cache-dir", "--out", "-o"):
            if equals:
                words[place] = f"{option}={_nameless(option, value)}"
            elif place + 1 < len(words):
                words[place + 1] = _nameless(option, words[place + 1])
    return shlex.join(["primum", *words])


def _nameless(option: str, value: str) -> str:
    return Path(value).name if option in ("--out", "-o") else "DIR"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m primum.experiments.sweeps.compare ...`, without the other commands."""
    parser = argparse.ArgumentParser(prog="primum")
    add_compare(parser.add_subparsers(required=True))
    words = ["compare", *(sys.argv[1:] if argv is None else argv)]
    arguments = parser.parse_args(words)
    arguments.typed = words
    return int(arguments.run(arguments, parser))


if __name__ == "__main__":
    sys.exit(main())
