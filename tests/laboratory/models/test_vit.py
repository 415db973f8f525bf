"""Vision transformers: parameter counts, patches, and the details of the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.models.vit import ViT, ViTBlock


@pytest.mark.parametrize(("width", "count"), [(384, 6_268_810), (192, 1_586_122)])
def test_parameter_counts(width: int, count: int) -> None:
    """Counted by hand; the reference says 6.3 million."""
    tokens = 64 + 1
    block = 2 * 2 * width + 4 * (width**2 + width) + 2 * (width**2 + width)
    expected = (48 * width + width) + width + tokens * width + 7 * block
    expected += 2 * width + 10 * width + 10
    assert sum(p.numel() for p in ViT(10, width=width).parameters()) == expected == count


def test_block_against_one_sample_and_head_at_a_time() -> None:
    torch.manual_seed(0)
    width, heads = 12, 3
    block = ViTBlock(width, heads, dropout=0.0).double()
    tokens = torch.randn(2, 5, width, dtype=torch.float64)

    def attend(sample: Tensor) -> Tensor:
        query, key, value = block.query_key_value(block.attention_norm(sample)).split(width, dim=1)
        parts = []
        for head in range(heads):
            own = slice(head * width // heads, (head + 1) * width // heads)
            scores = query[:, own] @ key[:, own].T / math.sqrt(width)  # not of width / heads
            parts.append(scores.softmax(dim=1) @ value[:, own])
        return sample + block.project(torch.cat(parts, dim=1))

    norm, first, _, _, second, _, _ = block.mlp
    for sample, result in zip(tokens, block(tokens), strict=True):
        between = attend(sample)
        mlp = F.gelu(second(F.gelu(first(norm(between)))))  # a GELU at the end too
        torch.testing.assert_close(result, between + mlp, rtol=1e-12, atol=1e-12)


def test_a_patch_reaches_its_own_token_alone() -> None:
    model = ViT(10, image_size=32, width=24, depth=1, heads=2)
    image = torch.zeros(1, 3, 32, 32)
    seen: list[Tensor] = []
    model.embed.register_forward_hook(lambda *args: seen.append(args[2]))
    model(image)
    image[:, :, 4:8, 8:12] = 1.0  # second row, third column of 8 x 8 patches
    model(image)
    changed = (seen[0] != seen[1]).any(dim=2)[0]
    assert changed.nonzero().flatten().tolist() == [8 + 2]


def test_dropout_acts_in_training_alone() -> None:
    model = ViT(10, width=24, depth=1, heads=2, dropout=0.5)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match=r"multiple of 8.*got 30"):
        ViT(10, image_size=30)
    with pytest.raises(ValueError, match="divide the width 64, got 12"):
        ViT(10, width=64, heads=12)
