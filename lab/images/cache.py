"""Cache of decoded images on disk.

File names contain a hash of the source, so a changed source is decoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lab.errors import UserError
from lab.files import atomic
from lab.images.sources import DataError

FORMAT = 1  # increase it if the format changes


def cached(folder: str | None, name: str, origin: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, from the cache if it is there; tensors, or lists and dicts of them.

    Args:
        folder: folder of the cache; None calls `make` every time.
        name: prefix of the file name.
        origin: everything that the result depends on.
        make: computes the result.
    """
    if folder is None:
        return make()
    key = hashlib.sha256(f"{FORMAT} {origin}".encode()).hexdigest()[:16]
    path = Path(folder).expanduser() / f"{name.replace('/', '--')}-{key}.pt"
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # damaged in any way: it is only a cache
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
