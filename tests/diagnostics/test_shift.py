"""Share of a step that moves all logits alike, against a loop over samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from primum.diagnostics import common_shift


def oracle(before: Tensor, after: Tensor) -> float:
    changes = []
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        change = [b - a for a, b in zip(old, new, strict=True)]
        middle = sum(change) / len(change)
        changes.append([each - middle for each in change])
    mean = [sum(column) / len(changes) for column in zip(*changes, strict=True)]
    sizes = [sum(each**2 for each in change) for change in changes]
    return sum(each**2 for each in mean) / (sum(sizes) / len(sizes))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_agrees_with_a_loop_over_samples(scale: float) -> None:
    torch.manual_seed(0)
    before = torch.randn(7, 5)
    after = before + scale * (torch.randn(7, 5) + torch.randn(5))
    # Differences of logits near 1 that differ by 1e-4 are known to about 1e-3.
    assert float(common_shift(before, after)) == pytest.approx(oracle(before, after), rel=5e-3)


def test_alike_unrelated_and_opposite() -> None:
    torch.manual_seed(0)
    before = torch.randn(64, 10)
    assert float(common_shift(before, before + torch.randn(10))) == pytest.approx(1, abs=1e-5)
    # The mean of B unrelated changes has a B-th of their squared norm.
    unrelated = [float(common_shift(before, before + torch.randn(64, 10))) for _ in range(50)]
    assert sum(unrelated) / 50 == pytest.approx(1 / 64, rel=0.2)
    move = torch.randn(32, 10)
    opposite = torch.cat((move, -move))
    assert float(common_shift(before, before + opposite)) == pytest.approx(0, abs=1e-6)


def test_what_no_softmax_notices_is_ignored() -> None:
    torch.manual_seed(0)
    before, move = torch.randn(8, 4), torch.randn(8, 4)
    plain = common_shift(before, before + move)
    torch.testing.assert_close(common_shift(before, before + move + 3 * torch.randn(8, 1)), plain)
    still = torch.zeros(8, 4)
    assert torch.isnan(common_shift(still, still + 1))


def test_positions_count_as_samples_and_half_precision_is_not_summed() -> None:
    torch.manual_seed(0)
    before, after = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    rows = common_shift(before.flatten(0, 1), after.flatten(0, 1))
    assert common_shift(before, after) == rows
    half = common_shift(before.bfloat16(), after.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, rows, rtol=0.05, atol=0)  # rounding of the logits themselves


def test_shapes_that_differ_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"same shape, got \(2, 3\) and \(3, 3\)"):
        common_shift(torch.zeros(2, 3), torch.zeros(3, 3))
