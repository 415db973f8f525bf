"""A small inspection on generated images."""

from __future__ import annotations

import pytest

from primum.experiments.images import DataSettings, ImageData, load_data
from primum.experiments.inspection import InspectSettings

DATA = DataSettings("generated", train_size=40, test_size=20, image_size=8, classes=4)


@pytest.fixture
def settings() -> InspectSettings:
    """Five steps of eight samples, looked at before steps 0, 2, 4 and after the last."""
    return InspectSettings(
        data=DATA, batch_size=8, train_steps=5, every=2, augment="none", lr_factors=(0.5, 1.0)
    )


@pytest.fixture
def data() -> ImageData:
    return load_data(DATA)
