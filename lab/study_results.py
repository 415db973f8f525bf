"""Finished runs of all studies, and the paper's claims judged from stored runs."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lab.budgets import Budgets
from lab.default_radius import Gains, gains_of
from lab.defaults import OPTIMIZERS, RATES
from lab.evidence import findings_of, records_of
from lab.judge import Outcome
from lab.runs import INDEX, TABLE, RunRecord, read_index, read_table
from lab.schedules import scaled_lr
from lab.statistics import Difference, family
from lab.tables import Group, group_runs

MODELS = {  # in plots
    "cnn-whitened": "speedrun",
    "cnn-small": "small CNN",
    "vit-micro": "transformer",
    "resnet20": "ResNet-20",
}
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
WHOLE = 50_000  # training images of CIFAR-10 and CIFAR-100
MAIN = ("primum@radius=0.1", "primum", "primum@radius=0.4", "paper")
TUNED = ("speedrun", "tuned")  # studies of recipes that were tuned for base
NAMES = {  # on the page; others keep theirs
    "primum": "primum, radius 0.2",
    "primum@radius=0.1": "primum, radius 0.1",
    "primum@radius=0.4": "primum, radius 0.4",
    "primum@radius=0.8": "primum, radius 0.8",
    "primum@radius=0.4,radius_schedule=grow-linear": "radius 0 to 0.4",
    "primum@radius=0.4,radius_schedule=fade-linear": "radius 0.4 to 0",
    **{f"{arm}@radius=0.4": f"{arm}, radius 0.4" for arm in ("permuted", "normalised")},
    "lr-matched@radius=0.4": "lr-matched to radius 0.4",
    "upgrad@upgrad_scale=mean-1": "upgrad, mean 1",
    "upgrad-network": "upgrad, whole network",
    "upgrad-network@upgrad_scale=mean-1": "upgrad, whole network, mean 1",
    "primum@radius=0.05": "primum, radius 0.05",
    "primum@radius=0.2": "primum, radius 0.2",
    "primum@radius=0.4,radius_schedule=fade-linear,radius_low=0.1": "radius 0.4 to 0.1",
    "primum@radius=0.4,until=0.5": "radius 0.4, first half only",
    "primum@radius=0.4,part=head": "radius 0.4, head alone",
    "primum@radius=0.4,part=backbone": "radius 0.4, backbone alone",
    "primum@per=sample": "whole sequences, radius 0.1",
    "primum@radius=0.2,per=sample": "whole sequences, radius 0.2",
    "primum@max_extra_weight=0.5": "primum, extra weights up to 0.5",
    "primum@max_extra_weight=1.0": "primum, extra weights up to 1",
}


class Row(NamedTuple):
    """A setting: description, runs, whether base was tuned, and each arm minus base."""

    name: str
    group: Group
    tuned: bool
    tests: dict[str, Difference]


def named(arm: str, *, language: bool = False) -> str:
    """An arm's name on the images page or the language page, where `primum` has another radius."""
    return "primum, radius 0.1" if language and arm == "primum" else NAMES.get(arm, arm)


class Results:
    """Finished runs of all studies, from their tables.

    Attributes:
        studies: Page, question, command and number of planned runs of each study, by name.
        runs: Finished runs of each study; none if it shares all of them with earlier studies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.studies = read_index(folder / INDEX)
        paths = {name: folder / f"{name}{TABLE}" for name in self.studies}
        self.runs = {n: read_table(path) if path.exists() else [] for n, path in paths.items()}

    def of(self, page: str) -> dict[str, list[RunRecord]]:
        """Finished runs of the studies on a page."""
        return {n: runs for n, runs in self.runs.items() if self.studies[n]["page"] == page}

    def groups(self, study: str) -> list[Group]:
        """Runs of a study by settings."""
        return group_runs(self.runs[study])

    @cached_property
    def every(self) -> list[Group]:
        """All settings of the page's studies, at any learning rate."""
        return self._together(self.of("results"))

    @cached_property
    def settings(self) -> list[Group]:
        """All settings at their default learning rate, each once, with all arms and seeds."""
        rates = ("rates", "rivals")
        return self._together(name for name in self.of("results") if not name.startswith(rates))

    def _together(self, studies: Iterable[str]) -> list[Group]:
        """Runs of several studies by settings; a run that they share counts once."""
        runs = [run for name in studies for run in self.runs[name]]
        return group_runs(list({run.arm_settings["key"]: run for run in runs}.values()))

    @cached_property
    def overview(self) -> list[Row]:
        """All settings with their differences from base, tuned ones first; a column is a family.

        Settings with a single seed are left out.
        """
        keys = {run.arm_settings["key"] for name in TUNED for run in self.runs.get(name, ())}
        rows = []
        for group in self.settings:
            compared = [group.pair(arm, "base", group.judged_by) for arm in MAIN]
            if any(pair is not None and len(pair[0]) > 1 for pair in compared):
                tuned = any(run.arm_settings["key"] in keys for run in group.runs)
                rows.append(Row(in_words(group.settings), group, tuned, {}))
        for arm in MAIN:
            pairs = {
                n: row.group.pair(arm, "base", row.group.judged_by) for n, row in enumerate(rows)
            }
            for n, test in family(pairs).items():
                rows[n].tests[arm] = test
        return sorted(rows, key=lambda row: not row.tuned)

    def default_radius(self) -> list[Gains]:
        """The gains that the rule for the default radius uses."""
        longest = Budgets(self.runs["speedrun"]).groups
        groups = [longest[max(longest)]] if longest else []
        groups += [
            group
            for group in self.groups("tuned")
            # The rule was written for these, before batch norm was tried.
            if group.settings["data"] == "cifar10" and group.settings["norm"] != "batch"
        ]
        found = [gains_of(in_words(group.settings), group) for group in groups]
        return [each for each in found if each is not None]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """The paper's claims at scale small, judged from the stored runs and measurements."""
        folder = self.folder / "reproduce" / "small"
        stored = json.loads(gzip.decompress((folder / "measurements.json.gz").read_bytes()))
        runs = {run.arm_settings["key"]: run for run in read_table(folder / f"runs{TABLE}")}
        return [
            Outcome(
                name=name,
                title=each["title"],
                scale="small",
                findings=tuple(
                    findings_of(name, "small", records_of(each["runs"], runs), each["scripts"])
                ),
                command=each["command"],
                environment=each["environment"],
                notes=tuple(each["notes"]),
            )
            for name, each in stored.items()
        ]


def in_words(settings: dict[str, Any], *, rate: bool = True) -> str:
    """A short description of settings; the learning rate only if it is not the paper's."""
    words = [
        settings["model"] + _norm(settings),
        DATA.get(settings["data"], settings["data"]),
        OPTIMIZERS[settings["optimizer"]],
        f"B {settings['batch_size']}",
        f"{(settings['train_size'] or WHOLE) // 1000}k images",
        f"{settings['epochs']} epochs",
    ]
    usual = scaled_lr(RATES[settings["optimizer"]], settings["batch_size"])
    if rate and not math.isclose(settings["lr"], usual):
        words.append(f"lr {settings['lr']:g}")
    return ", ".join(words + _extras(settings))


def in_short(settings: dict[str, Any]) -> str:
    """The same for a plot: without what most settings have in common, and the learning rate."""
    words = [MODELS[settings["model"]] + _norm(settings), OPTIMIZERS[settings["optimizer"]]]
    if settings["data"] != "cifar10":
        words.append(DATA[settings["data"]])
    if settings["model"] != "cnn-whitened" and settings["batch_size"] != 128:
        words.append(f"B {settings['batch_size']}")
    return ", ".join([*words, f"{settings['epochs']} epochs", *_extras(settings)])


def _norm(settings: dict[str, Any]) -> str:
    return ", batch norm" if settings["norm"] == "batch" else ""


def _extras(settings: dict[str, Any]) -> list[str]:
    words = ["warm-up, clipping"] if settings["clip"] else []
    noise = settings["label_noise"]
    return [*words, f"{noise:.0%} wrong labels"] if noise else words
