"""Losses and gradients of a linear head, a few outputs at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from primum.streamed import FEW, Gradients, Streamed, default_width, visit


def source(
    *, seed: int = 0, tokens: int = 7, outputs: int = 11, width: int = 4, smoothing: float = 0.0
) -> Streamed:
    rng = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(*shape, generator=rng, dtype=torch.float64)
        for shape in ((tokens, 3), (outputs, 3), (outputs,))
    ]
    targets = torch.randint(outputs, (tokens,), generator=rng)
    targets[: tokens // 3] = -100
    return Streamed(*made, targets, -100, smoothing, width, torch.float64)


def reference(of: Streamed, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients by autograd."""
    assert of.bias is not None
    leaves = [each.clone().requires_grad_() for each in (of.features, of.weight, of.bias)]
    losses = F.cross_entropy(
        F.linear(*leaves), of.targets, reduction="none", label_smoothing=of.smoothing
    )
    return losses.detach(), list(torch.autograd.grad(losses @ rows, leaves))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 9),
    outputs=st.integers(1, 13),
    width=st.integers(1, 15),
    smoothing=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_losses_and_gradients(
    seed: int, tokens: int, outputs: int, width: int, smoothing: float, scale: float
) -> None:
    of = source(seed=seed, tokens=tokens, outputs=outputs, width=width, smoothing=smoothing)
    of = Streamed(scale * of.features, *list(vars(of).values())[1:])
    losses, normaliser = of.losses()
    rows = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    expected, gradients = reference(of, rows)
    torch.testing.assert_close(losses, expected)
    ready = Streamed(*list(vars(of).values())[:8], normaliser, rows)
    made = Gradients.like(ready, (True, True, True))
    seen: list[slice] = []
    visit(ready, made, lambda outputs, found: seen.append(outputs))
    assert [each.start for each in seen] == list(range(0, outputs, width))
    assert seen[-1].stop == outputs
    for found, wanted in zip((made.features, made.weight, made.bias), gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_huge_logits_do_not_overflow() -> None:
    of = source()
    of = Streamed(1e6 * of.features, *list(vars(of).values())[1:])
    losses, _ = of.losses()
    torch.testing.assert_close(losses, reference(of, losses.new_zeros(7))[0])
    assert losses.isfinite().all()


def test_a_target_that_is_no_class() -> None:
    of = source()
    of.targets[-1] = 11
    with pytest.raises(IndexError, match="target 11 is out of bounds for 11 classes"):
        of.losses()


def test_only_what_is_needed() -> None:
    made = Gradients.like(source(), (False, True, False))
    assert made.features is None
    assert made.weight is not None
    assert made.bias is None


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(4096, 768, 32_000), (16_384, 2048, 128_000), (512, 64, 4096)]
)
def test_blocks_are_small(tokens: int, inputs: int, outputs: int) -> None:
    width = default_width(tokens, inputs, outputs)
    assert tokens * width <= max(FEW, tokens * inputs // 4)
    assert width * inputs <= max(FEW, inputs * outputs // 64)


def test_what_is_small_is_one_block() -> None:
    assert default_width(54, 8, 37) == 37
    assert default_width(1, 8, 1) == 1
    assert default_width(0, 8, 5) == 5
