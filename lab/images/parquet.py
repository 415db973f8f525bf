"""Parquet files in a folder or on the Hugging Face hub: splits, columns, classes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.images.sources import DataError, DataSettings

IMAGE_COLUMNS = ("img", "image")
SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}


@dataclass(frozen=True)
class Table:
    """A stored split: encoded images and labels, by row.

    `rows` is a Hugging Face dataset (streaming, if `streaming`) with the columns image and label.
    """

    rows: Any
    split: str
    where: str
    image_column: str
    label_column: str
    class_names: tuple[str, ...] | None


def parquet_files(settings: DataSettings) -> dict[str, list[Path]]:
    """The files of both splits in `data_dir`, sorted by name."""
    assert settings.data_dir is not None
    folder = Path(settings.data_dir).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"data folder {folder} does not exist; pass the folder with the Parquet files of "
            f"{settings.name}, or no folder to download it from the Hugging Face hub"
        )
    inner = folder / settings.name
    folder = inner if inner.is_dir() else folder
    found = sorted(folder.rglob("*.parquet"))
    if not found:
        others = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"no Parquet file (*.parquet) in {folder}; it holds {others}")
    files: dict[str, list[Path]] = {}
    for split, names in SPLITS.items():
        for name in names:
            files[split] = [path for path in found if _split_of(path.relative_to(folder)) == name]
            if files[split]:
                break
        else:
            listed = ", ".join(str(path.relative_to(folder)) for path in found[:5])
            raise DataError(
                f"no Parquet file of the {split} split in {folder}; a file or its folder must be "
                f"called {' or '.join(names)}, as in {names[0]}-00000-of-00001.parquet; "
                f"found {listed}"
            )
    return files


def open_table(settings: DataSettings, split: str, *, streaming: bool) -> Table:
    """Open a split from the folder or the hub, and check its columns."""
    # Takes two seconds, for which `primum --help` should not wait.
    import datasets  # type: ignore[import-untyped]

    # Keeps its files in a separate folder, or in its default one.
    cache_dir = settings.cache_dir and str(Path(settings.cache_dir).expanduser() / "huggingface")
    try:
        if settings.data_dir is not None:
            files = parquet_files(settings)[split]
            where = str(files[0].parent)
            rows = datasets.load_dataset(
                "parquet",
                data_files={split: [str(path) for path in files]},
                split=split,
                streaming=streaming,
                cache_dir=cache_dir,
            )
        else:
            where = f"{settings.source.hub} on the Hugging Face hub"
            splits = datasets.load_dataset(
                settings.source.hub, streaming=streaming, cache_dir=cache_dir
            )
            rows = _pick(splits, split, where)
    except DataError:
        raise
    except Exception as error:  # network, authorisation, Arrow, file system
        raise DataError(
            f"cannot read {settings.name} ({split}): {error}; {_advice(settings)}"
        ) from error
    return _with_columns(rows, settings, split, where)


def _advice(settings: DataSettings) -> str:
    if settings.data_dir is not None:
        return "check that the Parquet files are complete, or download them again"
    return "pass data_dir, a folder with its Parquet files, to work without the hub"


def _split_of(path: Path) -> str | None:
    """The split of a file, by its own name or that of the nearest folder."""
    names = "|".join(name for names in SPLITS.values() for name in names)
    for part in (path.stem, *reversed(path.parent.parts)):
        match = re.match(rf"({names})(?![a-z])", part.lower())
        if match:
            return match.group(1)
    return None


def _pick(splits: Any, split: str, where: str) -> Any:
    for name in SPLITS[split]:
        if name in splits:
            return splits[name]
    raise DataError(f"{where} has no {split} split; it has {', '.join(splits)}")


def _with_columns(rows: Any, settings: DataSettings, split: str, where: str) -> Table:
    import datasets

    columns = list(rows.features)
    image = _column(columns, IMAGE_COLUMNS, "images", where)
    wanted = (settings.label_column,) if settings.label_column else settings.source.label_columns
    label = _column(columns, wanted, "labels", where)
    names = getattr(rows.features[label], "names", None)
    expected = settings.source.classes if settings.label_column is None else None
    if names is not None and expected is not None and len(names) != expected:
        raise DataError(
            f"{settings.name} has {expected} classes, but column {label!r} in {where} has "
            f"{len(names)}; check the data folder"
        )
    rows = rows.select_columns([image, label])
    rows = rows.cast_column(image, datasets.Image(decode=False))
    return Table(rows, split, where, image, label, tuple(names) if names else None)


def _column(columns: list[str], wanted: tuple[str, ...], what: str, where: str) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DataError(
        f"no column of {what} in {where}: looked for {' or '.join(map(repr, wanted))}, "
        f"found {', '.join(map(repr, columns))}"
    )
