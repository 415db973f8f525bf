"""A sweep's folder: finished runs and checkpoints.

DIR/runs/primum-seed0-<key>.json       a finished run
DIR/checkpoints/primum-seed0-<key>.pt  an unfinished run; removed when it is finished
DIR/*.jsonl.gz                         tables of finished runs, which are also read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lab.errors import UserError, reading
from lab.files import atomic, remove_drafts
from lab.runs import TABLE, RunRecord, read_table, run_from, write_run
from lab.settings import RunSettings

AGAIN = "delete it to start this run from step 0"


@dataclass(frozen=True)
class Store:
    """The folder of a sweep."""

    folder: Path

    def run_path(self, settings: RunSettings) -> Path:
        """File of the finished run."""
        return self.folder / "runs" / f"{_name(settings)}.json"

    def checkpoint_path(self, settings: RunSettings) -> Path:
        """File of the run's last checkpoint."""
        return self.folder / "checkpoints" / f"{_name(settings)}.pt"

    def prepare(self) -> None:
        """Create the folders, to report errors before the first run, and delete temporary files."""
        for name in ("runs", "checkpoints"):
            folder = self.folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"cannot create the folder {folder}: {error.strerror}; choose another --out"
                ) from error
            remove_drafts(folder)

    @cached_property
    def tables(self) -> dict[str, RunRecord]:
        """Runs of the compressed tables in the folder, by key."""
        paths = sorted(self.folder.glob(f"*{TABLE}"))
        runs = [run for path in paths for run in read_table(path)]
        return {str(run.arm_settings["key"]): run for run in runs if "key" in run.arm_settings}

    def find(self, settings: RunSettings) -> RunRecord | None:
        """The finished run, or None."""
        path = self.run_path(settings)
        if not path.exists():
            return self.tables.get(settings.key)
        with reading(path, "delete it to repeat the run"):
            return run_from(json.loads(path.read_text(encoding="utf-8")))

    def save_run(self, settings: RunSettings, record: RunRecord) -> None:
        """Write a finished run and delete its checkpoint."""
        write_run(record, self.run_path(settings))
        self.checkpoint_path(settings).unlink(missing_ok=True)

    def save_checkpoint(self, settings: RunSettings, state: Mapping[str, Any]) -> None:
        """Write the state of an unfinished run."""
        with atomic(self.checkpoint_path(settings)) as file:
            torch.save(dict(state), file)

    def load_checkpoint(self, settings: RunSettings) -> dict[str, Any] | None:
        """The state of an unfinished run; None if there is no checkpoint."""
        path = self.checkpoint_path(settings)
        if not path.exists():
            return None
        with reading(path, AGAIN):
            state = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise UserError(f"it holds a {type(state).__name__}, not the state of a run")
        return state


def _name(settings: RunSettings) -> str:
    return f"{settings.arm.name}-seed{settings.seed}-{settings.key}"
