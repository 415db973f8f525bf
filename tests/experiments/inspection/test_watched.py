"""Training, step by step."""

from __future__ import annotations

import pytest
import torch

from primum.diagnostics import InterferenceMeter
from primum.experiments.images import Batches, ImageData
from primum.experiments.inspection import InspectSettings
from primum.experiments.inspection.watched import Watched
from primum.experiments.models import build_model


def start(settings: InspectSettings, data: ImageData) -> Watched:
    model = build_model(settings.model, data.classes, data.image_size, seed=0)
    optimizer = settings.make_optimizer(model)
    batches = Batches(data.train, data, batch_size=8)
    return Watched(settings, model, optimizer, batches, InterferenceMeter(num_samples=40))


def test_the_coming_batch_is_the_one_that_is_taken(
    settings: InspectSettings, data: ImageData
) -> None:
    training = start(settings, data)
    expected = Batches(data.train, data, batch_size=8)
    for epoch in range(2):
        for batch in expected.epoch(epoch):
            assert torch.equal(training.coming.ids, batch.ids)
            assert training.coming is training.coming
            training.step()
    assert training.step_count == 10


def test_after_closing_there_is_no_step(settings: InspectSettings, data: ImageData) -> None:
    training = start(settings, data)
    training.step()
    training.close()
    with pytest.raises(RuntimeError, match="closed"):
        training.step()
    assert len(training.losses) == 1
