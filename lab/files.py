"""Atomic file writes: readers see the old file or the complete new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lab.errors import UserError


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file; it is synced and moved to `path` if the block raises no error."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(_explain(path, error)) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode("utf-8"))


def remove_drafts(folder: Path) -> None:
    """Delete temporary files of `atomic` whose process was killed."""
    for draft in folder.glob(".*.part"):
        if not _is_running(draft.name.split(".")[-2]):
            draft.unlink(missing_ok=True)


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left to write {path}; free some space and run the same command again "
            "(finished runs are kept)"
        )
    return f"cannot write {path}: {error.strerror or error}; choose another folder"


def _is_running(process: str) -> bool:
    """Whether a process exists; True if that cannot be determined."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
