"""Losses, radii, and who is attached."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from primum.experiments.sweeps.arms import ABOUT, Arm
from primum.experiments.sweeps.method import (
    WATCH_EVERY,
    cross_entropies,
    focal_losses,
    make_method,
    radius_share,
)

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_loss_without_focus_is_cross_entropy(smoothing: float) -> None:
    expected = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(focal_losses(LOGITS, LABELS, 0.0, smoothing), expected)
    torch.testing.assert_close(cross_entropies(LOGITS, LABELS, smoothing), expected)
    soft = F.one_hot(LABELS, 4).float()
    torch.testing.assert_close(focal_losses(LOGITS, soft, 0.0, smoothing), expected)


def test_focal_loss_by_its_formula() -> None:
    p = LOGITS.softmax(1)[torch.arange(6), LABELS]
    torch.testing.assert_close(focal_losses(LOGITS, LABELS, 2.0), -((1 - p) ** 2) * p.log())


def test_focal_loss_of_a_certain_sample_has_a_gradient() -> None:
    sure = torch.tensor([[200.0, 0.0]], requires_grad=True)
    focal_losses(sure, torch.tensor([0]), 0.5).sum().backward()
    assert sure.grad is not None
    assert bool(sure.grad.isfinite().all())


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", (1.0, 1.0, 1.0)),
        ("grow-linear", (0.0, 0.5, 1.0)),
        ("fade-linear", (1.0, 0.5, 0.0)),
        ("grow-cosine", (0.0, 0.5, 1.0)),
        ("fade-cosine", (1.0, 0.5, 0.0)),
    ],
)
def test_radius_over_training(schedule: str, shares: tuple[float, ...]) -> None:
    arm = Arm.parse(f"primum@radius_schedule={schedule}")
    assert [radius_share(arm, step, 11) for step in (0, 5, 10)] == pytest.approx(shares)


def test_cosine_starts_slowly() -> None:
    linear, cosine = (Arm.parse(f"primum@radius_schedule=grow-{x}") for x in ("linear", "cosine"))
    assert radius_share(cosine, 1, 11) < radius_share(linear, 1, 11)


@pytest.mark.parametrize("name", list(ABOUT))
def test_each_arm_takes_a_step(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = make_method(Arm(name), model, optimizer, seed=0)
    inputs = torch.randn(6, 4)
    for step in range(3):
        losses = method.losses(model(inputs), LABELS, 0.0)
        method.prepare(step, 3, losses, watched=True)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    report = method.reducer.last
    assert report is not None
    assert report.applied == method.weighs == (name not in _WITHOUT_WEIGHTS)
    assert int(report.fallbacks) == 0


_WITHOUT_WEIGHTS = ("base", "lr-matched", "time-matched", "focal")


def test_an_arm_without_weights_is_watched_now_and_then() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = make_method(Arm("base"), model, optimizer, seed=0)
    assert [method.watched(place) for place in (0, 1, WATCH_EVERY)] == [True, False, True]
    losses = method.losses(model(LOGITS), LABELS, 0.0)
    method.prepare(1, 3, losses, watched=False)
    losses.mean().backward()
    assert method.reducer.last is None


def test_the_radius_reaches_the_recipe() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arm = Arm.parse("primum@radius=0.4,radius_schedule=fade-linear")
    method = make_method(arm, model, optimizer, seed=0)
    losses = method.losses(model(LOGITS), LABELS, 0.0)
    method.prepare(1, 5, losses, watched=True)
    assert method.recipe is not None
    assert method.recipe.radius == pytest.approx(0.3)
