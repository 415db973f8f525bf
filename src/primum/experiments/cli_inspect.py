"""`primum inspect`: what steps do to samples, in a model and data of one's choice."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DEFAULT_STEPS = 200


def add_inspect(subcommands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    inspect = subcommands.add_parser(
        "inspect",
        help="what steps do to samples, in the whole network: while training or at checkpoints",
        description="Look at a model about to take a step: whom it harms, in the head, in the "
        "whole network and really; how good the head is as a proxy; what weights remove. While "
        "training for some steps, or at checkpoints. Prints a table and writes run.json and "
        "report.html. Ctrl-C keeps what is finished.",
    )
    what = inspect.add_argument_group("what")
    what.add_argument("--model", default="cnn-small", metavar="NAME", help="%(default)s; or "
                      "resnet20, vit-micro, ..., or your own: package.module:factory")  # fmt: skip
    what.add_argument("--norm", choices=("group", "batch"), help="of models with the choice")
    what.add_argument("--data", default="cifar10", metavar="NAME", help="%(default)s; or cifar100, "
                      "digits, generated, ..., or owner/name on the Hugging Face hub")  # fmt: skip
    what.add_argument("--data-dir", metavar="DIR", help="folder with the data's Parquet files; "
                      "without it they come from the hub")  # fmt: skip
    what.add_argument("--train-size", type=_from(1), metavar="N", help="only so many images")
    what.add_argument("--test-size", type=_from(1), metavar="N", help="only so many images")
    what.add_argument("--augment", default="crop-flip", metavar="NAME", help="%(default)s; or none")
    what.add_argument("--checkpoint", type=Path, nargs="+", metavar="FILE", help="look at these "
                      "instead of training: a state_dict, or a dict with model, optimizer and "
                      "step")  # fmt: skip
    how = inspect.add_argument_group("how")
    how.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="%(default)s")
    how.add_argument("--lr", type=float, metavar="X", help="0.1 (SGD) or 0.001 (AdamW), times the "
                     "root of batch size / 128")  # fmt: skip
    how.add_argument("--weight-decay", type=float, metavar="X")
    how.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    how.add_argument("--batch-size", type=_from(1), default=128, metavar="N", help="%(default)s")
    how.add_argument("--train-steps", type=_from(0), metavar="N", help=f"{DEFAULT_STEPS}; "
                     "0 looks at the model as it is at first")  # fmt: skip
    how.add_argument("--every", type=_from(1), default=50, metavar="K", help="look every K steps")
    how.add_argument("--batches", type=_from(1), default=1, metavar="N", help="measured per look")
    how.add_argument("--reduce", action="store_true", help="train with primum.attach")
    how.add_argument("--radius", type=float, default=0.2, metavar="X", help="%(default)s")
    how.add_argument("--seed", type=_from(0), default=0, metavar="N")
    how.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    how.add_argument("--threads", type=_from(1), metavar="N", help="of torch; its own choice")
    inspect.add_argument("-o", "--out", type=Path, default=Path("runs/inspect"), metavar="DIR",
                         help="folder for run.json and report.html (%(default)s)")  # fmt: skip
    inspect.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from primum.experiments.images import DataError, DataSettings
    from primum.experiments.inspection import InspectError, InspectSettings
    from primum.experiments.inspection.command import run_inspection
    from primum.experiments.models import ModelError
    from primum.experiments.sweeps.compare import typed_command
    from primum.experiments.sweeps.ranks import check_device
    from primum.experiments.sweeps.settings import SettingsError

    if arguments.checkpoint and arguments.train_steps is not None:
        parser.error("--checkpoint looks at saved models, --train-steps trains one: give one")
    if arguments.checkpoint:
        arguments.train_steps = 0
    elif arguments.train_steps is None:
        arguments.train_steps = DEFAULT_STEPS
    plain = ("model", "norm", "optimizer", "lr", "weight_decay", "schedule", "batch_size",
             "augment", "train_steps", "every", "batches", "reduce", "radius", "seed",
             "device")  # fmt: skip
    try:
        check_device(arguments.device)
        settings = InspectSettings(
            data=DataSettings(
                arguments.data,
                arguments.data_dir,
                train_size=arguments.train_size,
                test_size=arguments.test_size,
            ),
            **{name: getattr(arguments, name) for name in plain},
        )
        return run_inspection(
            settings,
            arguments.out,
            checkpoints=arguments.checkpoint or (),
            command=typed_command(arguments.typed),
            threads=arguments.threads,
        )
    except (InspectError, DataError, ModelError, SettingsError, OSError) as error:
        print(f"primum inspect: {error}", file=sys.stderr)
        return 1


class _from:
    """A whole number from `least` up, for argparse."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or int(text) < self.least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {self.least} up, got {text}"
            )
        return int(text)
