"""Parquet files: which split a file belongs to, which column is which, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from lab.images import DataError, DataSettings
from lab.images.parquet import open_table, parquet_files
from laboratory.images.conftest import WriteParquet, some_images


def settings(folder: Path, name: str = "cifar10", **options: Any) -> DataSettings:
    return DataSettings(name, data_dir=str(folder), **options)


def write_pair(folder: Path, write: WriteParquet, train: str, test: str, **options: Any) -> None:
    for place in (train, test):
        write(folder / place, some_images(3), [0, 1, 2], **options)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("train.parquet", "validation.parquet"),
        ("data/train-00000.parquet", "data/valid-00000.parquet"),
        ("train/0000.parquet", "val/0000.parquet"),
        ("cifar10/train_0.parquet", "cifar10/test_0.parquet"),
    ],
)
def test_splits_by_name_of_file_or_folder(
    tmp_path: Path, write_parquet: WriteParquet, train: str, test: str
) -> None:
    write_pair(tmp_path, write_parquet, train, test)
    assert parquet_files(settings(tmp_path)) == {
        "train": [tmp_path / train],
        "test": [tmp_path / test],
    }


def test_files_come_in_order_of_their_names(cifar10_folder: Path) -> None:
    train = parquet_files(settings(cifar10_folder))["train"]
    assert [path.name[:11] for path in train] == ["train-00000", "train-00001"]


def test_a_name_that_only_starts_like_a_split_is_none(
    tmp_path: Path, write_parquet: WriteParquet
) -> None:
    write_pair(tmp_path, write_parquet, "trainers.parquet", "test.parquet")
    with pytest.raises(DataError, match=r"no Parquet file of the train split.*found.*trainers"):
        parquet_files(settings(tmp_path))


def test_a_folder_of_that_name_inside_goes_first(
    tmp_path: Path, write_parquet: WriteParquet
) -> None:
    for name in ("cifar10", "cifar100"):
        write_pair(tmp_path / name, write_parquet, "train.parquet", "test.parquet")
    assert parquet_files(settings(tmp_path))["train"] == [tmp_path / "cifar10/train.parquet"]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist; pass the folder"):
        parquet_files(settings(tmp_path / "nowhere"))


def test_no_parquet_in_the_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("readme.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no Parquet file.*it holds readme.txt"):
        parquet_files(settings(tmp_path))


def test_missing_split(tmp_path: Path, write_parquet: WriteParquet) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(1), [0])
    with pytest.raises(DataError, match=r"no Parquet file of the test split.*found train.parquet"):
        parquet_files(settings(tmp_path))


@pytest.mark.parametrize(
    ("name", "image", "label"),
    [("cifar10", "img", "label"), ("cifar10", "image", "label"), ("cifar100", "img", "fine_label")],
)
def test_columns(
    tmp_path: Path, write_parquet: WriteParquet, name: str, image: str, label: str
) -> None:
    write_pair(
        *(tmp_path, write_parquet, "train.parquet", "test.parquet"),
        image_column=image,
        label_column=label,
        features=False,
    )
    table = open_table(settings(tmp_path, name), "train", streaming=True)
    assert (table.image_column, table.label_column, table.class_names) == (image, label, None)
    assert [row[label] for row in table.rows] == [0, 1, 2]


def test_another_label_column_on_demand(tmp_path: Path, write_parquet: WriteParquet) -> None:
    options: dict[str, Any] = {"label_column": "coarse_label", "names": ["fish", "tree", "sea"]}
    write_pair(tmp_path, write_parquet, "train.parquet", "test.parquet", **options)
    with pytest.raises(DataError, match=r"no column of labels.*'fine_label' or 'label'.*'coarse"):
        open_table(settings(tmp_path, "cifar100"), "train", streaming=True)
    wanted = settings(tmp_path, "cifar100", label_column="coarse_label")
    table = open_table(wanted, "train", streaming=True)
    assert table.class_names == ("fish", "tree", "sea")


def test_missing_image_column(tmp_path: Path, write_parquet: WriteParquet) -> None:
    write_pair(tmp_path, write_parquet, "train.parquet", "test.parquet", image_column="photograph")
    with pytest.raises(DataError, match=r"'img' or 'image', found 'photograph', 'label'"):
        open_table(settings(tmp_path), "train", streaming=True)


def test_wrong_number_of_class_names(tmp_path: Path, write_parquet: WriteParquet) -> None:
    write_pair(
        tmp_path, write_parquet, "train.parquet", "test.parquet", names=["cat", "dog", "cow"]
    )
    with pytest.raises(DataError, match=r"cifar10 has 10 classes, but column 'label'.*has 3"):
        open_table(settings(tmp_path), "train", streaming=True)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_file_that_is_no_parquet(cifar10_folder: Path, streaming: bool) -> None:
    for path in cifar10_folder.glob("*.parquet"):
        path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"cannot read cifar10 \(train\).*download them again"):
        open_table(settings(cifar10_folder), "train", streaming=streaming)


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, cifar10_folder: Path) -> None:
    """The hub's answer is a dict of splits; its test split may be called validation."""
    asked: list[str] = []

    def answer(name: str, **options: Any) -> dict[str, Any]:
        asked.append(name)
        files = {k: str(cifar10_folder / f"{k}-*.parquet") for k in ("train", "test")}
        splits = load("parquet", data_files=files, **options)
        return {"train": splits["train"], "validation": splits["test"]}

    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", answer)
    table = open_table(DataSettings("cifar10"), "test", streaming=True)
    assert asked == ["uoft-cs/cifar10"]
    assert len(list(table.rows)) == 20
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: {"train": None})
    with pytest.raises(DataError, match="has no test split; it has train"):
        open_table(DataSettings("cifar10"), "test", streaming=True)


def test_no_way_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"cannot read cifar10 \(train\): no route; pass data_dir"):
        open_table(DataSettings("cifar10"), "train", streaming=True)
