"""Residual networks: published parameter counts, shapes, what a shortcut does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.models.resnet import CifarResNet, PadChannels, ResNet50


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("blocks", "count"), [(3, 269_722), (7, 658_586)])
def test_cifar_parameter_counts(norm: str, blocks: int, count: int) -> None:
    """As published for batch norm; group norm has the same two numbers per channel."""
    model = CifarResNet(10, blocks=blocks, norm=norm)  # type: ignore[arg-type]
    assert parameters(model) == count


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet50_parameter_count(norm: str) -> None:
    assert parameters(ResNet50(1000, norm=norm)) == 25_557_032  # type: ignore[arg-type]


def test_cifar_feature_sizes() -> None:
    """32 pixels and 16 channels after the stem, 8 and 64 before the head."""
    model = CifarResNet(10, blocks=3)
    stem = model.stem(torch.randn(2, 3, 32, 32))
    assert stem.shape == (2, 16, 32, 32)
    assert model.stages(stem).shape == (2, 64, 8, 8)


@pytest.mark.parametrize(("stem", "first", "last"), [("imagenet", 16, 2), ("small", 64, 8)])
def test_resnet50_feature_sizes(stem: str, first: int, last: int) -> None:
    model = ResNet50(10, norm="group", stem=stem).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        features = model.stem(torch.randn(1, 3, 64, 64))
        assert features.shape == (1, 64, first, first)
        assert model.stages(features).shape == (1, 2048, last, last)


def test_eight_groups_in_every_norm() -> None:
    norms = [m for m in CifarResNet(10, blocks=3).modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 19
    assert {norm.num_groups for norm in norms} == {8}


def test_padded_shortcut_keeps_every_second_pixel() -> None:
    features = torch.randn(2, 4, 6, 6)
    padded = PadChannels(4)(features)
    assert padded.shape == (2, 8, 3, 3)
    assert torch.equal(padded[:, 2:6], features[:, :, ::2, ::2])
    assert not padded[:, :2].any()
    assert not padded[:, 6:].any()
