"""Decoded images on disk, so that the next run does not decode them again.

A file is written beside its place and then moved there in one step: whoever reads finds a whole
file or none. Its name holds a hash of what it was made from, so a changed source is read anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from primum.experiments.images.settings import DataError

FORMAT = 1  # raise it when what is stored changes


def cached(folder: str | None, name: str, origin: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, from `folder` if it is there; tensors, and lists and dicts of them.

    Args:
        folder: where to keep it; None calls `make` every time.
        name: start of the file's name.
        origin: everything the result depends on.
        make: does the work.
    """
    if folder is None:
        return make()
    key = hashlib.sha256(f"{FORMAT} {origin}".encode()).hexdigest()[:16]
    path = Path(folder).expanduser() / f"{name.replace('/', '--')}-{key}.pt"
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # a damaged file says so in many ways; it is only a cache
            path.unlink(missing_ok=True)
    result = make()
    _write(result, path)
    return result


def _write(result: Any, path: Path) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(result, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        with suppress(OSError):
            part.unlink()
        raise DataError(
            f"cannot write decoded images to {path}: {error}; free some space, choose another "
            "cache_dir, or leave it out"
        ) from error
