"""From encoded images to bytes, at once or on access; which row is damaged."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from lab.augment import Augmentation
from lab.images import Batches, DataError, DataSettings, LazyImages, load_data
from lab.images.decode import decode_image, decode_table
from lab.images.parquet import Table, open_table
from laboratory.images.conftest import WriteParquet, encode, some_images

SIZES = [(20, 30), (40, 25), (24, 24), (31, 60)]


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


@pytest.fixture
def photographs(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """Eight photographs of four sizes; the last but one is damaged."""
    images = [some_images(1, SIZES[i % 4], seed=i)[0] for i in range(8)]
    encoded = [encode(each) for each in images]
    encoded[6] = encoded[6][:50]
    labels = [3, 2, 1, 0, 3, 2, 1, 0]
    path = tmp_path / "data"
    write_parquet(path / "train.parquet", encoded, labels, image_column="image")
    write_parquet(path / "validation.parquet", images[:4], labels[:4], image_column="image")
    return path


def settings(photographs: Path, train_size: int | None = None) -> DataSettings:
    return DataSettings(
        "imagenet100",
        data_dir=str(photographs),
        cache_dir=str(photographs.parent / "cache"),
        image_size=16,
        train_size=train_size,
    )


def test_each_image_as_it_is_stored(photographs: Path) -> None:
    data = load_data(settings(photographs))
    images = data.train.images
    assert isinstance(images, LazyImages)
    assert len(images) == 8
    for index in (0, 1, 5):
        assert torch.equal(images.read(index), some_images(1, SIZES[index % 4], seed=index)[0])
    assert data.train.labels.tolist() == [3, 2, 1, 0, 3, 2, 1, 0]
    assert data.classes == 100
    assert data.image_size == 16
    assert data.mean == (0.485, 0.456, 0.406)


def test_a_damaged_image_is_named_when_it_is_reached(photographs: Path) -> None:
    images = load_data(settings(photographs)).train.images
    assert isinstance(images, LazyImages)
    with pytest.raises(DataError, match=r"row 6 of the train split"):
        images.read(6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_told_in_a_line(photographs: Path, workers: int) -> None:
    data = load_data(settings(photographs))
    batches = Batches(data.train, data, batch_size=2, shuffle=False, workers=workers).epoch(0)
    assert [next(batches).ids.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match=r"row 6 of the train split") as told:
        next(batches)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("resized", [True, False])
def test_batches_are_the_same_with_workers(photographs: Path, resized: bool) -> None:
    data = load_data(settings(photographs, train_size=6))
    augmentation = Augmentation(resized=resized, flip=True, policy="rand")
    alone, helped = (
        Batches(data.train, data, batch_size=2, augmentation=augmentation, workers=workers)
        for workers in (0, 2)
    )
    batches = list(zip(alone.epoch(1), helped.epoch(1), strict=True))
    assert len(batches) == 3
    for first, second in batches:
        assert first.inputs.shape == (2, 3, 16, 16)
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, second.targets)
        assert torch.equal(first.ids, second.ids)
