"""`load_data`: all sources, and what they have in common."""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.images import DataError, DataSettings, load, load_data
from lab.images.load import ImageData
from laboratory.images.conftest import WriteParquet, some_images


def from_folder(folder: Path, **options: Any) -> ImageData:
    return load_data(DataSettings("cifar10", data_dir=str(folder), **options))


def test_a_folder(cifar10_folder: Path) -> None:
    data = from_folder(cifar10_folder)
    assert isinstance(data.train.images, Tensor)
    assert torch.equal(data.train.images, some_images(40, seed=1))
    assert isinstance(data.test.images, Tensor)
    assert torch.equal(data.test.images, some_images(20, seed=2))
    assert data.class_names[3] == "class 3"
    assert (data.classes, data.image_size, len(data.train)) == (10, 8, 40)
    assert data.train.labels.tolist() == [i % 10 for i in range(40)]


def test_a_subset_has_its_own_mean(cifar10_folder: Path) -> None:
    data = from_folder(cifar10_folder, train_size=10, test_size=5, balanced=False)
    assert len(data.test) == 5
    first = some_images(40, seed=1)[:10].double() / 255
    assert data.mean == pytest.approx(first.mean(dim=(0, 2, 3)).tolist())
    assert data.std == pytest.approx(first.std(dim=(0, 2, 3), correction=0).tolist())


def test_balanced_images_go_with_their_labels(tmp_path: Path, write_parquet: WriteParquet) -> None:
    labels = [0, 0, 0, *range(10)]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", some_images(13), labels)
    data = from_folder(tmp_path, train_size=10, balanced=True)
    assert data.train.labels.tolist() == list(range(10))
    assert isinstance(data.train.images, Tensor)
    assert torch.equal(data.train.images, some_images(13)[[0, *range(4, 13)]])


def test_noise_is_in_the_training_labels_alone(cifar10_folder: Path) -> None:
    data = from_folder(cifar10_folder, label_noise=0.5, noise_seed=7)
    again = from_folder(cifar10_folder)
    assert again.train.labels.tolist() == [i % 10 for i in range(40)]  # the cache is clean
    assert int((data.train.labels != again.train.labels).sum()) == 20
    assert torch.equal(data.test.labels, again.test.labels)


def test_decoded_once_for_all_settings(
    cifar10_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_folder(cifar10_folder)
    monkeypatch.delattr(load, "decode_table")
    from_folder(cifar10_folder, train_size=5, label_noise=0.1)


def test_cache_on_disk_and_changed_files(
    cifar10_folder: Path, tmp_path: Path, write_parquet: WriteParquet
) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    first = from_folder(cifar10_folder, **options)
    load._decoded.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(load, "decode_table")
        second = from_folder(cifar10_folder, **options)
    assert isinstance(first.train.images, Tensor)
    assert isinstance(second.train.images, Tensor)
    assert torch.equal(first.train.images, second.train.images)
    assert second.class_names == first.class_names
    changed = cifar10_folder / "test-00000-of-00001.parquet"
    write_parquet(changed, some_images(20, seed=9), [0] * 20)
    os.utime(changed, ns=(1, 1))
    third = from_folder(cifar10_folder, **options)
    assert isinstance(third.test.images, Tensor)
    assert torch.equal(third.test.images, some_images(20, seed=9))


def test_more_labels_than_classes(tmp_path: Path, write_parquet: WriteParquet) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(2), [0, 1])
    write_parquet(tmp_path / "test.parquet", some_images(2), [0, 10])
    with pytest.raises(DataError, match=r"cifar10 has 10 classes.*but a label is 10"):
        from_folder(tmp_path)


def test_the_example_runs() -> None:
    assert doctest.testmod(load) == doctest.TestResults(failed=0, attempted=2)


def test_digits_and_generated_need_no_files() -> None:
    digits = load_data(DataSettings("digits"))
    assert (len(digits.train), len(digits.test), digits.image_size) == (512, 1285, 8)
    assert len(load_data(DataSettings("digits", test_size=100)).test) == 100
    made = load_data(DataSettings("generated", classes=3, train_size=9, image_size=8))
    assert (made.classes, len(made.train), len(made.test), made.image_size) == (3, 9, 256, 8)
