"""Both models: shapes, and a last linear layer that gives the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lab.models import GroupNormCNN, PatchTransformer


@pytest.mark.parametrize("build", [GroupNormCNN, PatchTransformer])
def test_logits_come_from_the_head(build: type[nn.Module]) -> None:
    model = build()
    outputs: list[Tensor] = []
    model.get_submodule("head").register_forward_hook(lambda *args: outputs.append(args[2]))
    logits = model(torch.randn(5, 1, 8, 8))
    assert logits.shape == (5, 10)
    assert logits is outputs[0]


@pytest.mark.parametrize("build", [GroupNormCNN, PatchTransformer])
def test_samples_do_not_mix(build: type[nn.Module]) -> None:
    """A sample's logits do not depend on its batch: without that, no gradient is a sample's own."""
    model = build()
    images = torch.randn(4, 1, 8, 8)
    # Float32; batches of different size may add up in another order.
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-4, atol=1e-5)


def test_the_transformer_sees_where_a_patch_is() -> None:
    model = PatchTransformer()
    image = torch.randn(1, 1, 8, 8)
    assert not torch.allclose(model(image), model(image.flip(2)), atol=1e-4)
