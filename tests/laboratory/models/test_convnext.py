"""ConvNeXt: published parameter count, shapes, stochastic depth."""

from __future__ import annotations

import pytest
import torch

from lab.models.convnext import ChannelNorm, ConvNeXt, ConvNeXtBlock, DropPath


def small() -> ConvNeXt:
    return ConvNeXt(10, depths=(1, 1, 2, 1), widths=(8, 16, 24, 32), drop_path=0.4)


def test_parameter_count() -> None:
    assert sum(p.numel() for p in ConvNeXt(1000).parameters()) == 28_589_128


def test_sides_are_divided_by_32() -> None:
    assert small().stages(torch.randn(2, 3, 64, 96)).shape == (2, 32, 2, 3)


def test_drop_rate_rises_with_depth() -> None:
    rates = [m.rate for m in small().modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_drop_path_keeps_whole_samples_and_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    dropped = drop(torch.ones(20_000, 2, 3))
    per_sample = dropped.flatten(1)
    assert torch.equal(per_sample.amin(dim=1), per_sample.amax(dim=1))
    assert per_sample.unique().tolist() == pytest.approx([0.0, 4 / 3])
    # 20,000 draws: the share is known to 0.003 (one deviation).
    assert dropped.mean() == pytest.approx(1.0, abs=0.02)
    ones = torch.ones(4, 2)
    assert torch.equal(drop.eval()(ones), ones)


def test_a_block_starts_as_almost_nothing() -> None:
    block = ConvNeXtBlock(8, drop_path=0.0)
    features = torch.randn(2, 8, 8, 8)
    change = block(features) - features
    assert 0 < change.abs().max() < 1e-4


def test_channel_norm_is_over_the_channels_of_a_pixel() -> None:
    normed = ChannelNorm(16)(5 + 3 * torch.randn(2, 16, 4, 4))
    assert normed.mean(dim=1).abs().max() < 1e-5
    # Of 16 values, without Bessel's correction.
    torch.testing.assert_close(
        normed.var(dim=1, correction=0), torch.ones(2, 4, 4), rtol=1e-3, atol=0
    )
