"""Command-line options. The code behind a command is imported when it is run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.errors import UserError, missing_package
from lab.options import (
    add_arms,
    add_place,
    add_settings,
    at_least,
    check_words,
    typed_command,
)
from primum.kernel.recipe import RADIUS

COMMANDS = {
    "demo": "train two small models with and without primum and write a report",
    "compare": "train with and without primum, and with controls, over seeds; resumable",
    "reproduce": "a table or figure of the paper, its values beside ours",
    "inspect": "measure what steps do to samples, in the whole network",
    "report": "one page that compares runs: verdict, table, plots, settings",
}

DEMO_ARMS = ("base", "primum", "permuted", "lr-matched")
SCALES = ("full", "small", "smoke")
PAPER = (
    *("table1", "table2a", "table2b", "ablation-radius", "figure1", "figure2"),
    *("gram", "gram-adamw"),
)
SPEEDRUN = "speedrun"  # the one experiment of `reproduce` that is not from the paper
INSPECT_STEPS = 200
SEEDS = 10_000  # at most: every run of a grid is planned before the first
INSPECT_SETTINGS = (
    *("model", "norm", "data", "train_size", "test_size", "augment", "batch_size", "optimizer"),
    *("lr", "weight_decay", "schedule", "device"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        top_level().parse_args(words)
    name = words[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m lab {name}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if name in ("compare", "reproduce", "inspect"):  # their help texts contain the defaults
        parser.formatter_class = argparse.HelpFormatter
    add = {
        "demo": _demo,
        "compare": _compare,
        "reproduce": _reproduce,
        "inspect": _inspect,
        "report": _report,
    }
    add[name](parser)
    check_words(parser, words)
    arguments = parser.parse_args(words[1:])
    arguments.command = typed_command(words)
    arguments.words = words
    return guarded(f"lab {name}", lambda: _run(name, arguments, parser))


def top_level() -> argparse.ArgumentParser:
    """The parser without the options of the commands."""
    parser = argparse.ArgumentParser(
        prog="python -m lab", description="Compare training with and without primum."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    return parser


def guarded(name: str, work: Callable[[], int]) -> int:
    """Exit code of `work`; errors that a user can fix are printed as one line on stderr."""
    try:
        return work()
    except KeyboardInterrupt:
        print(
            "\nStopped. Finished runs are kept; run the same command again to continue.",
            file=sys.stderr,
        )
        return 130
    except (UserError, OSError, MemoryError, OverflowError) as error:
        print(f"{name}: {str(error) or 'not enough memory'}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1


def _run(name: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if name == "demo":
        from lab.demo import demo

        if "lr-matched" in arguments.arms and "primum" not in arguments.arms:
            parser.error("lr-matched takes its learning rate from primum's runs; add primum")
        return demo(arguments)
    if name == "reproduce":
        from lab.reproduce import list_experiments, reproduce, speedrun

        if arguments.list:
            return list_experiments()
        if arguments.name is None:
            parser.error(f"choose one of {', '.join((*PAPER, SPEEDRUN))}, or --list")
        if arguments.name == SPEEDRUN:
            return speedrun(arguments)
        if arguments.train_size is not None or arguments.budgets or arguments.precision:
            parser.error("--train-size, --budgets and --precision only apply to speedrun")
        return reproduce(arguments)
    if name == "inspect":
        from lab.commands import inspect

        if arguments.checkpoint and arguments.train_steps is not None:
            parser.error("use either --checkpoint or --train-steps, not both")
        if arguments.train_steps is None:
            arguments.train_steps = 0 if arguments.checkpoint else INSPECT_STEPS
        return inspect(arguments)
    from lab.commands import compare, report

    return compare(arguments) if name == "compare" else report(arguments)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a group-norm CNN with SGD and a small transformer with AdamW on noisy handwritten "
        "digits, with primum, without it and with two controls, over several seeds. Prints a table "
        "and writes report.html and results.json. Takes about two minutes on two cores; nothing is "
        "downloaded."
    )
    parser.add_argument(
        "--seeds", type=at_least(1, SEEDS), default=8, metavar="N", help="runs per arm"
    )
    parser.add_argument(
        "--epochs", type=at_least(1), default=15, metavar="N", help="epochs per run"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=DEMO_ARMS,
        default=list(DEMO_ARMS),
        metavar="ARM",
        help=f"any of {', '.join(DEMO_ARMS)}; base is always run, lr-matched needs primum",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder for the report"
    )
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="number of parallel runs, each on one thread; does not change results",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        default=1,
        metavar="N",
        help="processes per run (DistributedDataParallel with gloo), each with a part of every "
        "batch; changes results only by rounding",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a check that it runs, in a few seconds: 2 seeds, 2 epochs of 128 images, one "
        "process; --seeds, --epochs and --threads are ignored",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train an image classifier or a language model with several arms over several seeds, one "
        "file per run, then print a table with intervals and tests against base and write "
        "summary.json, summary.md and report.html. "
        "Finished runs are skipped and unfinished ones resumed: run the same command again to "
        "continue."
    )
    add_arms(parser)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text file for --task language; "
                        "default: Python's own documentation. The last tenth is held "
                        "out")  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least(1, SEEDS), default=3, metavar="N", help="seeds per arm (3)"
    )
    parser.add_argument("--first-seed", type=at_least(0), default=0, metavar="N", help="first seed")
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write curves for TensorBoard"
    )
    add_place(parser, "runs/compare")
    add_settings(parser)


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Repeat an experiment of the paper and print for each of its claims: reproduced, not "
        "reproduced, or not run. full is the paper's own setting, for GPUs; small takes an hour or "
        "two on two cores; smoke takes a minute and only checks that it runs. Finished runs are "
        "kept, and shared between experiments of one scale. speedrun is not from the paper: a "
        "strong recipe on CIFAR-10, with and without primum, at several budgets."
    )
    names = (*PAPER, SPEEDRUN)
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="list all experiments and their cost")
    parser.add_argument("--scale", choices=SCALES, default="small", help="(%(default)s)")
    parser.add_argument(
        "--seeds", type=at_least(1, SEEDS), metavar="N", help="runs per arm (by scale)"
    )
    parser.add_argument("--train-size", type=at_least(1), metavar="N", help="speedrun: number of "
                        "training images (by scale)")  # fmt: skip
    parser.add_argument("--budgets", type=at_least(1), nargs="+", default=[], metavar="N",
                        help="speedrun: lengths of the schedules in epochs")  # fmt: skip
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="speedrun (bf16 if the "
                        "device supports it, else fp32)")  # fmt: skip
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse and resume runs in --out; with --no-resume, refuse a folder that has runs",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    add_place(parser, "runs/reproduce")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what the next step does to the samples of its batch: in the head, in the whole "
        "network, and by taking it on copies; how well the head approximates the network; how much "
        "harm weights remove. Measures during training or at checkpoints, prints a table and "
        "writes run.json and report.html. Ctrl-C keeps finished measurements."
    )
    add_settings(parser, INSPECT_SETTINGS)
    parser.set_defaults(schedule="constant")
    how = parser.add_argument_group("how to measure")
    how.add_argument("--data-dir", metavar="DIR", help="folder with the data's Parquet files; "
                     "default: download from the Hugging Face hub")  # fmt: skip
    how.add_argument("--checkpoint", type=Path, nargs="+", metavar="FILE", help="measure these "
                     "instead of training: a state_dict, or a dict with model, optimizer and "
                     "step")  # fmt: skip
    how.add_argument("--train-steps", type=at_least(0), metavar="N", help="length of training; 0 "
                     f"measures the untrained model ({INSPECT_STEPS})")  # fmt: skip
    how.add_argument("--every", type=at_least(1), default=50, metavar="K", help="steps between "
                     "measurements (%(default)s)")  # fmt: skip
    how.add_argument("--batches", type=at_least(1), default=1, metavar="N", help="batches per "
                     "measurement")  # fmt: skip
    how.add_argument("--reduce", action="store_true", help="train with primum.attach")
    how.add_argument(
        "--radius",
        type=float,
        default=RADIUS["sample"],
        metavar="X",
        help="radius of the trust region (%(default)s)",
    )
    how.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    how.add_argument("--threads", type=at_least(1), metavar="N", help="torch threads")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/inspect"), metavar="DIR",
                        help="folder for run.json and report.html (%(default)s)")  # fmt: skip


def _report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read runs and write one self-contained HTML page: verdict, table with intervals, plots, "
        "settings, versions and commands. Runs with the same name and settings are compared, arm "
        "by arm."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run file (.json), table of runs (.jsonl.gz), results.json of the demo, or folder",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="output file"
    )
    parser.add_argument("--title", default="What did the steps do?", help="title of the page")
