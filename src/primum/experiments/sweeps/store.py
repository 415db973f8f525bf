"""Runs and checkpoints on disk, each whole or not there at all.

DIR/runs/primum-seed0-<key>.json       a finished run
DIR/checkpoints/primum-seed0-<key>.pt  one under way; removed when it is finished
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from primum.experiments.runs import FORMAT, RunError, RunRecord, run_from, without_nan
from primum.experiments.sweeps.settings import RunSettings


class StoreError(OSError):
    """A folder that cannot be written to or a file that cannot be read, with what to do."""


@dataclass(frozen=True)
class Store:
    """The folder of a sweep."""

    folder: Path

    def run_path(self, settings: RunSettings) -> Path:
        """Where the run is, once it is finished."""
        return self.folder / "runs" / f"{_name(settings)}.json"

    def checkpoint_path(self, settings: RunSettings) -> Path:
        """Where it is before."""
        return self.folder / "checkpoints" / f"{_name(settings)}.pt"

    def prepare(self, finished: str = "runs") -> None:
        """Make the folders now, so that trouble shows before the first run.

        Drafts that a process left when it was killed are removed. `finished` is the folder of what
        is finished.
        """
        for name in (finished, "checkpoints"):
            folder = self.folder / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make the folder {folder}: {error}") from error
            for draft in folder.glob(".*.part"):
                if not _lives(draft.name.split(".")[-2]):
                    draft.unlink(missing_ok=True)

    def find(self, settings: RunSettings) -> RunRecord | None:
        """The finished run, if there is one."""
        path = self.run_path(settings)
        if not path.exists():
            return None
        try:
            return run_from(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RunError) as error:
            raise StoreError(
                f"{path} cannot be read: {error}; remove it, and the run is made again"
            ) from error

    def save_run(self, settings: RunSettings, record: RunRecord) -> None:
        """Write a finished run; its checkpoint goes."""
        content = without_nan({"format": FORMAT, **asdict(record)})
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_safely(self.run_path(settings), text.encode())
        self.checkpoint_path(settings).unlink(missing_ok=True)

    def save_checkpoint(self, settings: RunSettings, state: Mapping[str, Any]) -> None:
        """Write where a run has got to."""
        save_state(self.checkpoint_path(settings), state)

    def load_checkpoint(self, settings: RunSettings) -> dict[str, Any] | None:
        """Where a run has got to; None if it has to start anew."""
        return load_state(self.checkpoint_path(settings))


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint: plain values and tensors."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_safely(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any] | None:
    """What is in a checkpoint; None if there is none that can be read, which is then removed."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a damaged file says so in many ways; the run only starts anew
        path.unlink(missing_ok=True)
        return None
    return state


def write_safely(path: Path, content: bytes) -> None:
    """Write beside, bring to the disk, then move into place: power may fail at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(_explain(path, error)) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left to write {path}; free some and give the same command again: "
            "finished runs are kept"
        )
    return f"cannot write {path}: {error.strerror or error}"


def _lives(process: str) -> bool:
    """Whether a process is still there; when in doubt, it is."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # which cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _name(settings: RunSettings) -> str:
    return f"{settings.arm.name}-seed{settings.seed}-{settings.key}"
