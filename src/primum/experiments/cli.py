"""The options of the commands. What they do is imported when one of them is run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from primum.experiments.errors import UserError, missing_package
from primum.experiments.options import (
    add_arms,
    add_place,
    add_settings,
    at_least,
    typed_command,
)
from primum.positions import RADIUS
from primum_cli import COMMANDS, top_level

DEMO_ARMS = ("base", "primum", "permuted", "lr-matched")
SCALES = ("full", "small", "smoke")
PAPER = (
    *("table1", "table2a", "table2b", "ablation-radius", "figure1", "figure2", "multilayer"),
    *("gram", "gram-adamw"),
)
SPEEDRUN = "speedrun"  # what `primum reproduce` has besides the paper
INSPECT_STEPS = 200
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
        prog=f"primum {name}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
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
    arguments = parser.parse_args(words[1:])
    arguments.command = typed_command(words)
    arguments.words = words
    return guarded(f"primum {name}", lambda: _run(name, arguments, parser))


def guarded(name: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; errors that a user can fix become one line on stderr."""
    try:
        return work()
    except KeyboardInterrupt:
        print(
            "\nStopped. Finished runs are kept; run the same command again to continue.",
            file=sys.stderr,
        )
        return 130
    except (UserError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1


def _run(name: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if name == "demo":
        from primum.experiments.demo import demo

        if "lr-matched" in arguments.arms and "primum" not in arguments.arms:
            parser.error("lr-matched takes its learning rate from primum's runs; add primum")
        return demo(arguments)
    if name == "reproduce":
        from primum.experiments.reproduce import list_experiments, reproduce

        if arguments.list:
            return list_experiments()
        if arguments.name is None:
            parser.error(f"choose one of {', '.join((*PAPER, SPEEDRUN))}, or --list")
        if arguments.name == SPEEDRUN:
            from primum.experiments.speedrun_command import speedrun

            return speedrun(arguments)
        if arguments.train_size is not None or arguments.budgets or arguments.precision:
            parser.error("--train-size, --budgets and --precision are options of speedrun alone")
        return reproduce(arguments)
    if name == "inspect":
        from primum.experiments.commands import inspect

        if arguments.checkpoint and arguments.train_steps is not None:
            parser.error("--checkpoint measures saved models, --train-steps trains one: give one")
        if arguments.train_steps is None:
            arguments.train_steps = 0 if arguments.checkpoint else INSPECT_STEPS
        return inspect(arguments)
    from primum.experiments.commands import compare, report

    return compare(arguments) if name == "compare" else report(arguments)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a group-norm CNN with SGD and a small transformer with AdamW on noisy handwritten "
        "digits, with primum, without it and with two controls, over several seeds. Prints a table "
        "and writes report.html and results.json. Takes about two minutes on two cores; nothing is "
        "downloaded."
    )
    parser.add_argument("--seeds", type=at_least(1), default=8, metavar="N", help="runs per arm")
    parser.add_argument(
        "--epochs", type=at_least(1), default=15, metavar="N", help="epochs per run"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=DEMO_ARMS,
        default=list(DEMO_ARMS),
        metavar="ARM",
        help=f"of {', '.join(DEMO_ARMS)}; base is always run, lr-matched needs primum",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder for the report"
    )
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="runs at the same time, each on one thread; changes no result",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        default=1,
        metavar="N",
        help="processes that share each run (DistributedDataParallel with gloo), each with a part "
        "of every batch; changes results by rounding only",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few seconds to see that it works: 2 seeds, 2 epochs of 128 images, one process; "
        "--seeds, --epochs and --threads are ignored",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a model of images or text with several arms over several seeds, one file per run, "
        "then print a table with intervals and tests against base and write summary.json, "
        "summary.md and report.html. "
        "Finished runs are skipped and unfinished ones resumed: run the same command again to "
        "continue."
    )
    add_arms(parser)
    parser.add_argument("--text", metavar="FILE", help="plain text in UTF-8 for --task language; "
                        "without it, Python's own documentation. The last tenth is held "
                        "out")  # fmt: skip
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="per arm (3)")
    parser.add_argument("--first-seed", type=at_least(0), default=0, metavar="N", help="(0)")
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write curves for TensorBoard"
    )
    add_place(parser, "runs/compare")
    add_settings(parser)


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train or measure what a part of the paper reports, and state for each of its claims: "
        "reproduced, not reproduced, or not run. full is the paper's own setting, for GPUs; small "
        "takes an hour or two on two cores; smoke takes a minute and only shows that it runs. "
        "Finished runs are kept, and shared between experiments of one scale. speedrun is not from "
        "the paper: a strong recipe on CIFAR-10, with and without primum, at several budgets."
    )
    names = (*PAPER, SPEEDRUN)
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="all experiments and their cost")
    parser.add_argument("--scale", choices=SCALES, default="small", help="(%(default)s)")
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help="instead of the scale's own")
    parser.add_argument("--train-size", type=at_least(1), metavar="N", help="speedrun: images, "
                        "instead of the scale's own")  # fmt: skip
    parser.add_argument("--budgets", type=at_least(1), nargs="+", default=[], metavar="N",
                        help="speedrun: epochs of the schedules")  # fmt: skip
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="speedrun: bf16 if the "
                        "device computes in it, else fp32")  # fmt: skip
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use and resume runs in --out; otherwise, refuse a folder that has some",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    add_place(parser, "runs/reproduce")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a model about to take a step: which samples it harms, in the head, in the whole "
        "network and really; how well the head approximates the network; what weights remove. "
        "While training for some steps, or at checkpoints. Prints a table and writes run.json and "
        "report.html. Ctrl-C keeps what is finished."
    )
    add_settings(parser, INSPECT_SETTINGS)
    parser.set_defaults(schedule="constant")
    how = parser.add_argument_group("how to measure")
    how.add_argument("--data-dir", metavar="DIR", help="folder with the data's Parquet files; "
                     "else the hub")  # fmt: skip
    how.add_argument("--checkpoint", type=Path, nargs="+", metavar="FILE", help="measure these "
                     "instead of training: a state_dict, or a dict with model, optimizer and "
                     "step")  # fmt: skip
    how.add_argument("--train-steps", type=at_least(0), metavar="N", help=f"{INSPECT_STEPS}; "
                     "0 measures the untrained model")  # fmt: skip
    how.add_argument("--every", type=at_least(1), default=50, metavar="K", help="steps between "
                     "measurements (%(default)s)")  # fmt: skip
    how.add_argument("--batches", type=at_least(1), default=1, metavar="N", help="per measurement")
    how.add_argument("--reduce", action="store_true", help="train with primum.attach")
    how.add_argument(
        "--radius", type=float, default=RADIUS["sample"], metavar="X", help="%(default)s"
    )
    how.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    how.add_argument("--threads", type=at_least(1), metavar="N", help="of torch; its own default")
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
        help="a run's JSON file, a table .jsonl.gz, results.json of primum demo, or a folder",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page"
    )
    parser.add_argument("--title", default="What did the steps do?", help="heading of the page")


if __name__ == "__main__":
    sys.exit(main())
