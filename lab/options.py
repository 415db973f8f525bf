"""Command-line options from settings, and settings from options."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.arms import ARMS, Arm, arm_settings
from lab.defaults import LANGUAGE
from lab.errors import UserError
from lab.settings import RunSettings, run_options
from lab.texts import name_of

LARGEST = 2**31 - 1  # of an integer: sums and products of a few still fit in 64 bits


def whole(text: str) -> int:
    """An argparse type: an integer that torch can take."""
    try:
        value = int(text)
    except ValueError as error:  # also one of thousands of digits
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:40]}") from error
    if abs(value) > LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST}, got {text[:40]}")
    return value


def at_least(least: int, most: int = LARGEST) -> Any:
    """An argparse type: an integer >= `least`, and <= `most`."""

    def within(text: str) -> int:
        if not text.isdecimal() or whole(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text[:40]}")
        if whole(text) > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}")
        return whole(text)

    return within


def check_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse what no file name and no page can hold: NUL, and bytes that are not UTF-8."""
    option = ""
    for word in words:
        option = word.partition("=")[0] if word.startswith("-") else option
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            parser.error(f"{option or 'argument'}: must be text without NUL, got {word!r}")


def add_settings(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    """Add one option per setting of a run; several values form a grid of runs.

    With `only`, add only these settings, with one value each.
    """
    several = "" if only else "; several values form a grid"
    group = parser.add_argument_group(f"what to train{several}")
    for each in run_options():
        if only and each.name not in only:
            continue
        kind, about, choices = (each.metadata[name] for name in ("kind", "help", "choices"))
        option = "--" + each.name.replace("_", "-")
        if kind is bool:
            group.add_argument(
                option, action=argparse.BooleanOptionalAction, default=each.default, help=about
            )
            continue
        usual = "" if each.default is None else str(each.default)
        if each.name in LANGUAGE and not only:
            usual += f"{'; ' if usual else ''}language: {LANGUAGE[each.name]}"
        group.add_argument(
            option,
            nargs=None if only or each.name == "task" else "+",
            type=whole if kind is int else kind,
            choices=choices,
            # Missing values are filled in once the task is known.
            default=each.default if only else None,
            metavar=None if choices else _metavar(kind),
            help=f"{about} ({usual})" if usual else about,
        )


def add_arms(parser: argparse.ArgumentParser) -> None:
    """Add the options for arms and their settings."""
    listed = "; ".join(f"{name}: {info.about}" for name, info in ARMS.items())
    group = parser.add_argument_group("arms")
    group.add_argument(
        "--arms",
        nargs="+",
        default=["base", "primum"],
        metavar="ARM",
        help=f"{listed}. base is always run. An arm may have settings: primum@radius=0.4",
    )
    for each in arm_settings():
        kind, about, choices = (each.metadata[name] for name in ("kind", "help", "choices"))
        group.add_argument(
            "--" + each.name.replace("_", "-"),
            type=whole if kind is int else kind,
            choices=choices,
            metavar=None if choices else _metavar(kind),
            help=about,
        )


def add_place(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options for folders and number of processes."""
    group = parser.add_argument_group("where and how many processes")
    group.add_argument(
        "--data-dir",
        metavar="DIR",
        help="folder with the data's Parquet files, or with kjv.txt for --data kjv; default: "
        "download from the Hugging Face hub",
    )
    group.add_argument("--cache-dir", metavar="DIR", help="folder for decoded images")
    group.add_argument(
        "--out", type=Path, default=Path(out), metavar="DIR", help="folder for runs (%(default)s)"
    )
    group.add_argument(
        "--workers",
        type=at_least(1),
        default=1,
        metavar="K",
        help="number of parallel runs, at most the number of cores (1)",
    )
    group.add_argument(
        "--threads", type=at_least(1), default=1, metavar="N", help="torch threads per run (1)"
    )
    group.add_argument(
        "--data-workers",
        type=at_least(0),
        default=0,
        metavar="N",
        help="processes per run that prepare images; useful for photographs (0)",
    )
    group.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="time between checkpoints (30)",
    )


def points(arguments: argparse.Namespace) -> list[RunSettings]:
    """The grid of settings, with default arm and seed."""
    usual = _usual(arguments)
    values: dict[str, list[Any]] = {}
    for each in run_options():
        given = getattr(arguments, each.name)
        given = usual.get(each.name, each.default) if given is None else given
        values[each.name] = given if isinstance(given, list) else [given]
    return [
        RunSettings(**dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def _usual(arguments: argparse.Namespace) -> dict[str, Any]:
    """Defaults that differ from those of `RunSettings`, for options that were not given."""
    text = getattr(arguments, "text", None)
    if arguments.task != "language":
        if text is not None:
            raise UserError("--text needs --task language")
        return {}
    usual = dict(LANGUAGE)
    if arguments.epochs is not None:
        del usual["steps"]
    if text is not None:
        if arguments.data is not None:
            raise UserError("--text and --data both name a text; pass only one of them")
        usual["data"] = name_of(text)
    return usual


def arms(arguments: argparse.Namespace) -> list[Arm]:
    """The chosen arms, with the common settings that each accepts."""
    given = {
        each.name: value
        for each in arm_settings()
        if (value := getattr(arguments, each.name)) is not None
    }
    return [Arm.parse(text, given, arguments.task or "images") for text in arguments.arms]


def typed_command(typed: Sequence[str]) -> str:
    """The command line without local folder names."""
    words = list(typed)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--data-dir", "--cache-dir", "--text", "--out", "-o"):
            if equals:
                words[place] = f"{option}={_without_folder(option, value)}"
            elif place + 1 < len(words):
                words[place + 1] = _without_folder(option, words[place + 1])
    return shlex.join(["python", "-m", "lab", *words])


def _without_folder(option: str, value: str) -> str:
    return Path(value).name if option in ("--out", "-o", "--text") else "DIR"


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "NAME")
