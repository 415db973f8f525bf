"""Cross entropy and the focal loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lab.losses import cross_entropies, focal_losses

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
