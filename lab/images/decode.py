"""Decode images to uint8 tensors: all at once, or on access."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lab.images.parquet import Table
from lab.images.sources import DataError

CHUNK = 1000  # rows read at a time


def decode_image(stored: Any, where: str) -> Tensor:
    """Decode an image from Hugging Face's dict with bytes or path -> uint8 [3, H, W].

    Grey and palette images become RGB. `where` names the image in errors.
    """
    try:
        encoded = stored["bytes"]
        with Image.open(stored["path"] if encoded is None else BytesIO(encoded)) as image:
            pixels = np.array(image.convert("RGB"))
    except Exception as error:  # PIL raises errors of many kinds on broken files
        raise DataError(
            f"cannot decode the image in {where}: {error}; the file is damaged, download it again"
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_table(table: Table) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, H, W] and labels int64 [N] of a split. All images must have one size."""
    images: list[Tensor] = []
    labels: list[Any] = []
    for rows in table.rows.iter(batch_size=CHUNK):
        for stored in rows[table.image_column]:
            where = _row(table, len(images))
            image = decode_image(stored, where)
            if images and image.shape != images[0].shape:
                first, this = ("{1} x {2}".format(*each.shape) for each in (images[0], image))
                raise DataError(f"all images must have one size: row 0 has {first}, {where} {this}")
            images.append(image)
        labels += rows[table.label_column]
    if not images:
        raise DataError(f"the {table.split} split in {table.where} is empty")
    return torch.stack(images), check_labels(labels, table)


def check_labels(labels: list[Any], table: Table) -> Tensor:
    """Class indices as a tensor, int64 [N]; raises for other labels."""
    for row, label in enumerate(labels):
        if not isinstance(label, int) or label < 0:
            raise DataError(
                f"column {table.label_column!r} must hold class indices (integers >= 0), "
                f"got {label!r} in {_row(table, row)}"
            )
    return torch.tensor(labels, dtype=torch.int64)


@dataclass(frozen=True)
class LazyImages:
    """Rows of a memory-mapped table, decoded on access: photographs that do not fit in memory.

    Workers share the table without copying. `size` is the side of the crops in a batch.
    """

    table: Table
    rows: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Tensor:
        """One image at its stored size. uint8 [3, H, W]."""
        row = int(self.rows[index])
        stored = self.table.rows[row][self.table.image_column]
        return decode_image(stored, _row(self.table, row))


def lazy_images(table: Table, size: int) -> tuple[LazyImages, Tensor]:
    """All rows of a table, read on access, and their labels [N], read now."""
    labels = check_labels(list(table.rows[table.label_column]), table)
    return LazyImages(table, torch.arange(len(labels)), size), labels


def _row(table: Table, row: int) -> str:
    return f"row {row} of the {table.split} split in {table.where}"
