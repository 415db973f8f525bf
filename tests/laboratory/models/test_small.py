"""The small CNN: its head, its size, its memory format."""

from __future__ import annotations

import torch

from lab.models.small import SmallCNN


def test_head_and_parameter_count() -> None:
    model = SmallCNN(10)
    assert model.head.weight.shape == (10, 64)
    convolutions = 9 * (3 * 16 + 16 * 32 + 32 * 64)
    norms, head = 2 * (16 + 32 + 64), 640 + 10
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + head


def test_channels_stay_last_in_memory_after_loading() -> None:
    """It is what makes it quick."""
    model = SmallCNN(10)
    model.load_state_dict(SmallCNN(10).state_dict())
    features = model.body(torch.randn(2, 3, 32, 32))
    assert features.is_contiguous(memory_format=torch.channels_last)
