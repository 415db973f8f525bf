"""The command line, `primum`. One subcommand per function; each adds its own parser."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import primum
from primum.experiments.arms import ARMS
from primum.experiments.cli_inspect import add_inspect
from primum.experiments.cli_report import add_report
from primum.experiments.extras import refuse
from primum.experiments.recipes import RECIPES
from primum.experiments.sweeps.compare import add_compare
from primum.experiments.sweeps.reproduce.cli import add_reproduce


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        parser = build_parser()
        arguments = parser.parse_args(argv)
        arguments.typed = list(sys.argv[1:] if argv is None else argv)
        return int(arguments.run(arguments, parser))
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C. No report was written.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        return refuse("primum", error)


def build_parser() -> argparse.ArgumentParser:
    """All subcommands."""
    parser = argparse.ArgumentParser(
        prog="primum",
        description="Reduce the harm an optimizer step does to samples of its own batch.",
    )
    parser.add_argument("--version", action="version", version=f"primum {primum.__version__}")
    subcommands = parser.add_subparsers(title="commands", required=True, metavar="command")
    _add_demo(subcommands)
    add_compare(subcommands)
    add_reproduce(subcommands)
    add_inspect(subcommands)
    add_report(subcommands)
    return parser


def _add_demo(subcommands: argparse._SubParsersAction[Any]) -> None:
    demo = subcommands.add_parser(
        "demo",
        help="train two small models with and without primum and write a report",
        description="Train a group-norm CNN with SGD and a small transformer with AdamW on noisy "
        "handwritten digits, with primum, without it and in two controls, over several seeds. "
        "Prints a table and writes report.html and results.json. Takes two to three minutes on two "
        "cores; nothing is downloaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--seeds", type=_positive, default=8, metavar="N", help="runs per arm")
    demo.add_argument(
        "--epochs", type=_positive, metavar="N", help="epochs per run, instead of each model's own"
    )
    demo.add_argument(
        "--arms",
        nargs="+",
        choices=list(ARMS),
        default=list(ARMS),
        metavar="ARM",
        help=f"what to compare, of {', '.join(ARMS)}; base is always run, lr-matched needs primum",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder for the report"
    )
    demo.add_argument(
        "--threads",
        type=_positive,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="runs at the same time, each on one thread; changes no result",
    )
    demo.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="processes that train each run together, by DistributedDataParallel with gloo, each "
        "with its share of every batch; the results are those of one but for rounding",
    )
    demo.add_argument(
        "--quick",
        action="store_true",
        help="a few seconds to see that it works: 2 seeds, 2 epochs of 128 images, one process; "
        "the other numbers given are ignored",
    )
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Imported here so that `primum --help` does not wait for matplotlib and scipy.
    from primum.experiments.demo import print_summary, run_demo, write_report

    if "lr-matched" in arguments.arms and "primum" not in arguments.arms:
        parser.error("lr-matched takes its learning rate from primum's runs; add primum to --arms")
    arms = [arm for arm in ARMS if arm == "base" or arm in arguments.arms]
    recipes = list(RECIPES.values())
    seeds, threads, turns = range(arguments.seeds), arguments.threads, 4
    if arguments.quick:
        seeds, threads, turns = range(2), 1, 1
        recipes = [replace(recipe, epochs=2, train_size=128) for recipe in recipes]
    elif arguments.epochs:
        recipes = [replace(recipe, epochs=arguments.epochs) for recipe in recipes]
    command = _command(arguments, arms)
    results = run_demo(
        recipes, arms, seeds, threads=threads, turns=turns, command=command, ranks=arguments.ranks
    )
    summaries = write_report(results, arguments.out)
    print_summary(summaries, arguments.out, results.seconds)
    return 0


def _command(arguments: argparse.Namespace, arms: Sequence[str]) -> str:
    """What to type to get the same report."""
    words = ["primum", "demo"]
    words += ["--quick"] if arguments.quick else ["--seeds", str(arguments.seeds)]
    if arguments.epochs and not arguments.quick:
        words += ["--epochs", str(arguments.epochs)]
    if len(arms) < len(ARMS):
        words += ["--arms", *arms]
    if arguments.ranks > 1:
        words += ["--ranks", str(arguments.ranks)]
    return shlex.join(words)


def _positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
