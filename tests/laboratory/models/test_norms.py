"""Norm layers and the first weights of convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.models.norms import init_convolutions, norm_layer


def test_kinds() -> None:
    group, batch = norm_layer("group", 4)(8), norm_layer("batch", 4)(8)
    assert isinstance(group, nn.GroupNorm)
    assert group.num_groups == 4
    assert isinstance(batch, nn.BatchNorm2d)


def test_convolutions_keep_the_variance_of_gradients() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 64, 3, bias=False)
    init_convolutions(conv)
    # 18,432 weights: their variance is known to about 1%.
    assert conv.weight.detach().var() == pytest.approx(2 / (64 * 9), rel=0.05)
