"""Accuracy over several views: which views, with which weights, and only at the end."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.images import load_data
from lab.job import default_callbacks
from lab.trainer import Trainer
from lab.views import Views, views_logits
from laboratory.conftest import tiny


class Corner(nn.Module):
    """The four corner pixels of the first channel, as logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]


def test_views_and_their_weights() -> None:
    images = torch.randn(5, 3, 6, 6)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = [padded[..., y : y + 6, y : y + 6] for y in (1, 0, 2)]
    torch.testing.assert_close(moved[0], images)
    model = Corner()
    expected = sum(
        weight * (model(view) + model(view.flip(3))) / 2
        for weight, view in zip((0.5, 0.25, 0.25), moved, strict=True)
    )
    torch.testing.assert_close(views_logits(model, images, 6), expected)
    two = (model(images) + model(images.flip(3))) / 2
    torch.testing.assert_close(views_logits(model, images, 2), two)


def trained(**changes: object) -> Trainer:
    settings = tiny("primum", views=6, **changes)
    trainer = Trainer(settings, load_data(settings.data_settings()), default_callbacks(settings))
    while not trainer.finished:
        assert math.isnan(trainer.callbacks[-1].accuracy)  # type: ignore[attr-defined]
        trainer.step()
    return trainer


def test_accuracy_at_the_end_and_only_there() -> None:
    trainer = trained()
    views = trainer.callbacks[-1]
    assert isinstance(views, Views)
    (test,) = trainer.test_batches()
    trainer.model.eval()
    with torch.no_grad():
        right = views_logits(trainer.model, test.inputs, 6).argmax(1) == test.targets
    expected = float(right.double().mean())
    assert views.fields(trainer) == {"final": {"views_test_accuracy": expected}}
    assert not any(isinstance(each, Views) for each in default_callbacks(tiny()))


def test_a_model_that_diverged_has_no_accuracy() -> None:
    trainer = trained()
    views = Views()
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    views.after_epoch(trainer)
    assert math.isnan(views.accuracy)
    assert trainer.model.training
