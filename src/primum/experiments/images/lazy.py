"""Images decoded on access: ImageNet-sized data, photographs of many sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primum.experiments.images.decode import check_labels, decode_image
from primum.experiments.images.parquet import Table


@dataclass(frozen=True)
class LazyImages:
    """Rows of a memory-mapped table on disk; workers share it without copying.

    `size` is the side of the crops in a batch.
    """

    table: Table
    rows: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Tensor:
        """One image at its stored size. uint8 [3, H, W]."""
        row = int(self.rows[index])
        where = f"row {row} of the {self.table.split} split in {self.table.where}"
        return decode_image(self.table.rows[row][self.table.image_column], where)


def lazy_images(table: Table, size: int) -> tuple[LazyImages, Tensor]:
    """All rows of a table, read on access, and their labels [N], read now."""
    labels = check_labels(list(table.rows[table.label_column]), table)
    return LazyImages(table, torch.arange(len(labels)), size), labels
