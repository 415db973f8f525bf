"""Settings: impossible ones are refused where they are made."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from lab.images import DataError, DataSettings, load_data


def test_settings_are_plain_values() -> None:
    settings = DataSettings("cifar10", data_dir="somewhere", train_size=100)
    assert DataSettings(**json.loads(json.dumps(asdict(settings)))) == settings


def test_another_data_set_of_the_hub() -> None:
    source = DataSettings("owner/name").source
    assert (source.hub, source.classes, source.lazy) == ("owner/name", None, False)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "generated"},
        {"name": "digits"},
        {"name": "generated", "classes": 3, "image_size": 5},
    ],
)
def test_a_shape_known_before_is_that_of_the_data(options: dict[str, Any]) -> None:
    settings = DataSettings(**options)
    data = load_data(settings)
    assert settings.known_shape == (data.classes, data.image_size)
    assert DataSettings("cifar10").known_shape is None  # a folder may hold anything


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar11"}, "unknown data 'cifar11'; choose from cifar10, cifar100"),
        ({"train_size": 0}, "train_size must be >= 1, got 0"),
        ({"test_size": -5}, "test_size must be >= 1, got -5"),
        ({"label_noise": 1.1}, r"label_noise must be between 0 and 1, got 1\.1"),
        ({"label_noise": -0.1}, r"got -0\.1"),
        ({"classes": 5}, "classes is for generated images"),
        ({"name": "generated", "classes": 1}, "must be >= 2, got 1"),
        ({"image_size": 64}, "cifar10 has its own"),
    ],
)
def test_impossible_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataSettings(**options)  # type: ignore[arg-type]
