"""From encoded images to bytes; which row is damaged."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from experiments.images.conftest import WriteParquet, encode, some_images
from primum.experiments.images import DataError, DataSettings
from primum.experiments.images.decode import decode_image, decode_table
from primum.experiments.images.parquet import Table, open_table


def table(folder: Path, split: str = "train") -> Table:
    return open_table(DataSettings("cifar10", data_dir=str(folder)), split, streaming=True)


def test_pixels_and_order_are_those_of_the_files(cifar10_folder: Path) -> None:
    images, labels = decode_table(table(cifar10_folder))
    assert images.dtype == torch.uint8
    assert torch.equal(images, some_images(40, seed=1))
    assert labels.tolist() == [i % 10 for i in range(40)]


def test_grey_and_palette_become_rgb() -> None:
    for mode in ("L", "P"):
        file = BytesIO()
        Image.new("RGB", (5, 4), (102, 102, 102)).convert(mode).save(file, "PNG")
        image = decode_image({"bytes": file.getvalue(), "path": None}, "here")
        assert image.shape == (3, 4, 5)
        assert (image == 102).all()  # a grey that the usual palette has


def test_an_image_by_its_path(tmp_path: Path) -> None:
    image = some_images(1)[0]
    path = tmp_path / "image.png"
    path.write_bytes(encode(image))
    assert torch.equal(decode_image({"bytes": None, "path": str(path)}, "here"), image)


@pytest.mark.parametrize("damage", ["cut", "nonsense", "empty"])
def test_a_damaged_image_is_named_by_its_row(
    tmp_path: Path, write_parquet: WriteParquet, damage: str
) -> None:
    whole = [encode(image) for image in some_images(5)]
    broken = {"cut": whole[3][:60], "nonsense": b"hello", "empty": b""}[damage]
    write_parquet(tmp_path / "train.parquet", [*whole[:3], broken, whole[4]], [0, 1, 2, 3, 4])
    write_parquet(tmp_path / "test.parquet", whole, [0] * 5)
    with pytest.raises(DataError, match=r"cannot decode the image in row 3 of the train split"):
        decode_table(table(tmp_path))


def test_images_of_two_sizes(tmp_path: Path, write_parquet: WriteParquet) -> None:
    images = [*some_images(2), *some_images(1, (8, 9))]
    write_parquet(tmp_path / "train.parquet", images, [0, 1, 2])
    write_parquet(tmp_path / "test.parquet", images, [0, 1, 2])
    with pytest.raises(DataError, match=r"row 0 has 8 x 8, row 2 of the train split.* 8 x 9"):
        decode_table(table(tmp_path))


@pytest.mark.parametrize(("labels", "found"), [([0, 1, -1], "-1"), (["a", "b", "c"], "'a'")])
def test_labels_that_are_no_class_numbers(
    tmp_path: Path, write_parquet: WriteParquet, labels: list[object], found: str
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", some_images(3), labels)
    with pytest.raises(DataError, match=f"column 'label' must hold class indices.*got {found} in"):
        decode_table(table(tmp_path))
