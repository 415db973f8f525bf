"""Decoded images on disk, so that the next run does not decode them again.

The name of a file contains a hash of what it was made from: a changed source is decoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from primum.experiments.errors import UserError
from primum.experiments.files import atomic
from primum.experiments.images.sources import DataError

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
        except Exception:  # a damaged file fails in many ways; it is only a cache
            path.unlink(missing_ok=True)
    result = make()
    _write(result, path)
    return result


def _write(result: Any, path: Path) -> None:
    try:
        with atomic(path) as file:
            torch.save(result, file)
    except (UserError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise DataError(
            f"cannot write decoded images to {path}: {error}; free some space, choose another "
            "cache_dir, or leave it out"
        ) from error
