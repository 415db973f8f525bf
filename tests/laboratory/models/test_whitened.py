"""The speedrun's CNN: its first layer whitens, and `attach` works through its scaled logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import primum
from lab.models import ModelError, build_model
from lab.models.whitened import WhitenedCNN, whitening_filters


def images(count: int = 64) -> torch.Tensor:
    """Smooth ones, whose neighbouring pixels and channels are correlated."""
    torch.manual_seed(0)
    coarse = torch.randn(count, 3, 6, 6) + torch.randn(count, 1, 6, 6)
    return F.interpolate(coarse, size=(16, 16), mode="bilinear")


def test_channels_of_the_first_layer_are_white() -> None:
    filters = whitening_filters(images())
    assert filters.shape == (24, 3, 2, 2)
    torch.testing.assert_close(filters[:12], -filters[12:])
    channels = F.conv2d(images(), filters[:12]).permute(1, 0, 2, 3).flatten(1)
    found = channels.double().cov()
    # Directions with little variance are scaled down by what is added to it: at most 1, never more.
    assert (found - found.diag().diag()).abs().max() < 1e-3
    assert found.diag().max() == pytest.approx(1.0, abs=1e-2)
    plain = images().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    assert plain.T.corrcoef().fill_diagonal_(0).abs().max() > 0.5  # there was something to remove


def test_what_is_trained() -> None:
    model = WhitenedCNN(7)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert not any(name.startswith("first") for name in trained)
    norms = [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert len(norms) == 6
    assert {f"{name}.bias" for name in norms} <= trained
    assert not {f"{name}.weight" for name in norms} & trained
    assert isinstance(model.head, nn.Linear)


def test_convolutions_start_as_the_identity_on_their_first_channels() -> None:
    conv = WhitenedCNN(7).groups[1][0]
    x = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(conv(x)[:, :32], x)


def test_too_small_images_are_refused() -> None:
    with pytest.raises(ModelError, match="image_size must be >= 16, got 8"):
        build_model("cnn-whitened", 10, 8)


def test_attach_works_through_the_scaled_logits() -> None:
    """The gradients are those of the weighted losses: the scale comes after the head."""
    model = build_model("cnn-whitened", 5, 16, seed=0)
    assert isinstance(model, WhitenedCNN)
    model.whiten(images())
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.85, nesterov=True)
    x, labels = images(16), torch.arange(16) % 5
    reducer = primum.attach(model, optimizer, radius=0.4)
    assert reducer.head is model.head
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    labels = labels.roll(1)  # momentum now harms some samples
    optimizer.zero_grad()
    logits = model(x)
    losses = F.cross_entropy(logits, labels, reduction="none")
    losses.mean().backward(retain_graph=True)
    assert reducer.last is not None
    assert reducer.last.applied
    extra = reducer.last.extra_weights
    assert extra.max() > 0.01
    found = [param.grad.clone() for param in params if param.grad is not None]
    with reducer.paused():
        wanted = torch.autograd.grad(((1 + extra) * losses).mean(), params)
    for own, other in zip(found, wanted, strict=True):
        # Sums over positions in another order, in float32.
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
