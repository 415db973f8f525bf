"""`Study`: a question and the runs that answer it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from lab import options
from lab.plan import plan
from lab.runs import RunRecord
from lab.settings import RunSettings
from lab.store import Store


@dataclass(frozen=True)
class Study:
    """A question and the runs that answer it.

    Attributes:
        name: Name on the command line.
        question: The question, as text.
        words: Options of `compare`.
        seeds: Number of seeds.
        own_runs: Returns the runs of a study that is not a `compare`.
        smoke_runs: Returns a few of these on generated images.
        page: The docs page that shows it.
        radius: Radius of the arm `primum`, regardless of the library's default.
    """

    name: str
    question: str
    words: str = ""
    seeds: int = 3
    own_runs: Callable[[], list[RunSettings]] | None = None
    smoke_runs: Callable[[], list[RunSettings]] | None = None
    page: str = "results"
    radius: float = 0.2

    @property
    def command(self) -> str:
        """The command that trains the runs."""
        if self.own_runs is not None:
            return f"python -m lab.studies --data-dir DIR --only {self.name}"
        words = f"{self.words} --seeds {self.seeds} --data-dir DIR --out results"
        return f"python -m lab compare {words}"

    def runs(self) -> list[RunSettings]:
        """All runs, in the order of training."""
        if self.own_runs is not None:
            return self.own_runs()
        parser = argparse.ArgumentParser()
        options.add_arms(parser)
        options.add_settings(parser)
        chosen = parser.parse_args(shlex.split(self.words))
        return plan(options.points(chosen), options.arms(chosen), range(self.seeds))

    def found(self, store: Store) -> list[RunRecord]:
        """The finished runs."""
        return [
            replace(record, arm=run.arm.label_at(self.radius))
            for run in self.runs()
            if (record := store.find(run)) is not None
        ]
