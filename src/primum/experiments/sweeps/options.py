"""The options of `primum compare`, made from the settings, and settings made from them again."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

from primum.experiments.sweeps.arms import ABOUT, CHOICES, READ, Arm
from primum.experiments.sweeps.settings import RunSettings, about

ARM_HELP = {
    "radius": "of the trust region (0.2)",
    "max_extra_weight": "bound on any extra weight (2)",
    "max_iters": "solver iterations per step (20)",
    "radius_schedule": "how the radius goes over training (constant)",
    "lr_match": "lr-matched: one factor for the run, or one for each epoch (overall)",
    "time_factor": "time-matched: steps as a multiple of base's (measured)",
    "focal_gamma": "focal: exponent (2)",
    "upgrad_scale": "upgrad: weights as published, or divided by their mean (published)",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per setting. Several values of one make a grid, with all arms at each point."""
    group = parser.add_argument_group("what to train; several values make a grid")
    for each in fields(RunSettings):
        if "help" not in each.metadata:
            continue
        known = about(each.name)
        option, default = "--" + each.name.replace("_", "-"), known["default"]
        if known["kind"] is bool:
            group.add_argument(
                option,
                action=argparse.BooleanOptionalAction,
                default=default,
                help=known["help"],
            )
            continue
        shown = known["help"] if default is None else f"{known['help']} (%(default)s)"
        group.add_argument(
            option,
            nargs="+",
            type=known["kind"],
            choices=known["choices"],
            default=default,
            metavar=None if known["choices"] else _metavar(known["kind"]),
            help=shown,
        )


def add_arms(parser: argparse.ArgumentParser) -> None:
    """Which arms, and their settings."""
    listed = "; ".join(f"{name}: {text}" for name, text in ABOUT.items())
    group = parser.add_argument_group("arms")
    group.add_argument(
        "--arms",
        nargs="+",
        default=["base", "primum"],
        metavar="ARM",
        help=f"{listed}. base is always run. A setting may be added: primum@radius=0.4",
    )
    for name, read in READ.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=read,
            choices=CHOICES.get(name),
            metavar=None if name in CHOICES else _metavar(read),
            help=ARM_HELP[name],
        )


def add_place(parser: argparse.ArgumentParser, out: str) -> None:
    """Where, how many, and how many at a time."""
    group = parser.add_argument_group("where and how many")
    group.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per arm (3)")
    group.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first (0)")
    group.add_argument(
        "--data-dir", metavar="DIR", help="folder with the data's Parquet files; else the hub"
    )
    group.add_argument("--cache-dir", metavar="DIR", help="where decoded images are kept")
    group.add_argument(
        "--out", type=Path, default=Path(out), metavar="DIR", help="folder for runs (%(default)s)"
    )
    group.add_argument(
        "--workers", type=int, default=1, metavar="K", help="runs at a time, at most the cores (1)"
    )
    group.add_argument("--threads", type=int, default=1, metavar="N", help="of torch, per run (1)")
    group.add_argument(
        "--data-workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that prepare images, per run; worth it for photographs (0)",
    )
    group.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="from one checkpoint to the next (30)",
    )
    group.add_argument(
        "--tensorboard", action="store_true", help="also write curves for TensorBoard"
    )


def points(arguments: argparse.Namespace) -> list[RunSettings]:
    """The grid of settings; arm and seed come later."""
    values: dict[str, list[Any]] = {}
    for each in fields(RunSettings):
        if "help" in each.metadata:
            given = getattr(arguments, each.name)
            values[each.name] = given if isinstance(given, list) else [given]
    return [
        RunSettings(**dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def arms(arguments: argparse.Namespace) -> list[Arm]:
    """The arms asked for, with the settings given for all of them."""
    given = {name: value for name in READ if (value := getattr(arguments, name)) is not None}
    return [Arm.parse(text, given) for text in arguments.arms]


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "NAME")
