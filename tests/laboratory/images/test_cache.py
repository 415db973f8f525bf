"""The cache on disk: made once, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.images import DataError
from lab.images.cache import cached


class Maker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"images": torch.arange(6), "names": ["a", "b"]}


def test_made_once_for_each_origin(tmp_path: Path) -> None:
    make = Maker()
    folder = str(tmp_path / "new" / "folder")
    for _ in range(3):
        result = cached(folder, "owner/name-train", "first", make)
        assert torch.equal(result["images"], torch.arange(6))
        assert result["names"] == ["a", "b"]
    assert make.calls == 1
    cached(folder, "owner/name-train", "second", make)
    assert make.calls == 2
    assert len(list(Path(folder).iterdir())) == 2


def test_without_a_folder_nothing_is_kept() -> None:
    make = Maker()
    for _ in range(2):
        cached(None, "name", "origin", make)
    assert make.calls == 2


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    make = Maker()
    cached(str(tmp_path), "name", "origin", make)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(cached(str(tmp_path), "name", "origin", make)["images"], torch.arange(6))
    cached(str(tmp_path), "name", "origin", make)
    assert make.calls == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(result: object, file: Any) -> None:
        file.write(b"a part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DataError, match=r"cannot write decoded images.*no space left.*cache_dir"):
        cached(str(tmp_path), "name", "origin", Maker())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(DataError, match="cannot write decoded images"):
        cached(str(blocked), "name", "origin", Maker())
