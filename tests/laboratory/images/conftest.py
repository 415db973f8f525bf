"""Small Parquet files, in the form they have on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from lab.images.load import _decoded

WriteParquet = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the home folder, nothing kept from other tests, no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    _decoded.cache_clear()


def some_images(count: int, size: tuple[int, int] = (8, 8), seed: int = 0) -> Tensor:
    """Random bytes [N, 3, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, *size), generator=generator, dtype=torch.uint8)


def encode(image: Tensor, form: str = "PNG") -> bytes:
    file = BytesIO()
    Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy())).save(file, form)
    return file.getvalue()


@pytest.fixture
def write_parquet() -> WriteParquet:
    """Writes images, given as tensors or as encoded bytes, and labels into one file."""

    def write(
        path: Path,
        images: Sequence[Tensor | bytes],
        labels: Sequence[object],
        *,
        image_column: str = "img",
        label_column: str = "label",
        names: Sequence[str] | None = None,
        features: bool = True,
    ) -> Path:
        encoded = [each if isinstance(each, bytes) else encode(each) for each in images]
        table = pa.table(
            {
                image_column: [{"bytes": each, "path": None} for each in encoded],
                label_column: list(labels),
            },
            schema=pa.schema(
                {
                    image_column: pa.struct({"bytes": pa.binary(), "path": pa.string()}),
                    label_column: pa.string() if isinstance(labels[0], str) else pa.int64(),
                }
            ),
        )
        if features:
            label = {"_type": "ClassLabel", "names": list(names)} if names else None
            known = {
                image_column: {"_type": "Image"},
                label_column: label or {"_type": "Value", "dtype": str(table.schema[1].type)},
            }
            about = {"huggingface": json.dumps({"info": {"features": known}})}
            table = table.replace_schema_metadata(about)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        return path

    return write


@pytest.fixture
def cifar10_folder(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """40 training images in two files, 20 test images; class i is that of image i, modulo 10."""
    folder = tmp_path / "data"
    train, test = some_images(40, seed=1), some_images(20, seed=2)
    names = [f"class {number}" for number in range(10)]
    labels = [i % 10 for i in range(40)]
    write_parquet(folder / "train-00000-of-00002.parquet", train[:25], labels[:25], names=names)
    write_parquet(folder / "train-00001-of-00002.parquet", train[25:], labels[25:], names=names)
    write_parquet(folder / "test-00000-of-00001.parquet", test, labels[:20], names=names)
    return folder
