"""Images that are decoded when asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.images.conftest import WriteParquet, encode, some_images
from primum.experiments.augment import Augmentation
from primum.experiments.images import Batches, DataError, DataSettings, LazyImages, load_data

SIZES = [(20, 30), (40, 25), (24, 24), (31, 60)]


@pytest.fixture
def folder(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """Eight photographs of four sizes; the last but one is damaged."""
    photographs = [some_images(1, SIZES[i % 4], seed=i)[0] for i in range(8)]
    encoded = [encode(each) for each in photographs]
    encoded[6] = encoded[6][:50]
    labels = [3, 2, 1, 0, 3, 2, 1, 0]
    path = tmp_path / "data"
    write_parquet(path / "train.parquet", encoded, labels, image_column="image")
    write_parquet(path / "validation.parquet", photographs[:4], labels[:4], image_column="image")
    return path


def settings(folder: Path, train_size: int | None = None) -> DataSettings:
    return DataSettings(
        "imagenet100",
        data_dir=str(folder),
        cache_dir=str(folder.parent / "cache"),
        image_size=16,
        train_size=train_size,
    )


def test_each_image_as_it_is_stored(folder: Path) -> None:
    data = load_data(settings(folder))
    images = data.train.images
    assert isinstance(images, LazyImages)
    assert len(images) == 8
    for index in (0, 1, 5):
        assert torch.equal(images.read(index), some_images(1, SIZES[index % 4], seed=index)[0])
    assert data.train.labels.tolist() == [3, 2, 1, 0, 3, 2, 1, 0]
    assert data.classes == 100
    assert data.image_size == 16
    assert data.mean == (0.485, 0.456, 0.406)


def test_a_damaged_image_is_named_when_it_is_reached(folder: Path) -> None:
    images = load_data(settings(folder)).train.images
    assert isinstance(images, LazyImages)
    with pytest.raises(DataError, match=r"row 6 of the train split"):
        images.read(6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_told_in_a_line(folder: Path, workers: int) -> None:
    data = load_data(settings(folder))
    batches = Batches(data.train, data, batch_size=2, shuffle=False, workers=workers).epoch(0)
    assert [next(batches).ids.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match=r"row 6 of the train split") as told:
        next(batches)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("resized", [True, False])
def test_batches_are_the_same_with_workers(folder: Path, resized: bool) -> None:
    data = load_data(settings(folder, train_size=6))
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
