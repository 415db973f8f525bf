"""The exact and the sketched operator of gradients that are computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from primum.blockwise import Folded, Streaming, fold_into
from primum.gram import MatrixFree
from primum.sketch import Factors, fold, random_signs
from test_streamed import source

DOUBLE = torch.float64


def ready(width: int = 4) -> tuple[Streaming, MatrixFree, Tensor]:
    """The operator, and the one with all gradients in memory."""
    of = source(width=width, tokens=6)
    losses, normaliser = of.losses()
    of = type(of)(*list(vars(of).values())[:8], normaliser, torch.ones_like(losses))
    g = of.gradient(slice(0, 11))
    x = torch.nn.functional.pad(of.features, (0, 1), value=1.0)
    gain = torch.rand(11, 4, dtype=DOUBLE)
    whole = MatrixFree(x, g, gain, has_bias=True)
    gains = {rows.start: gain[rows] for rows in of.blocks()}
    return Streaming(of, gains, whole.diagonal, 1, None, has_bias=True), whole, g


@pytest.mark.parametrize("width", [1, 4, 11])
def test_products(width: int) -> None:
    streaming, whole, _ = ready(width)
    vector = torch.rand(6, dtype=DOUBLE)
    torch.testing.assert_close(streaming.times(vector), whole.times(vector))


@pytest.mark.parametrize("width", [3, 4, 7])
@pytest.mark.parametrize("columns", [1, 3, 5, 16])
def test_folding_in_blocks(width: int, columns: int) -> None:
    gradients = torch.randn(4, 16, dtype=DOUBLE)
    signs = random_signs(16, gradients)
    folded = torch.zeros(4, width, dtype=DOUBLE)
    for first in range(0, 16, columns):
        rows = slice(first, min(first + columns, 16))
        fold_into(folded, gradients[:, rows] * signs[rows], first)
    torch.testing.assert_close(folded, fold(gradients, signs, width))


@pytest.mark.parametrize("gain", [1.0, 0.3, torch.tensor(0.3, dtype=DOUBLE), "by input"], ids=str)
def test_the_sketch_with_less_memory(gain: Tensor | float | str) -> None:
    x, g = torch.randn(5, 3, dtype=DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    used = torch.rand(1, 3, dtype=DOUBLE) if isinstance(gain, str) else gain
    lean, usual = Folded(x, g, used), MatrixFree(x, g, used)
    vector = torch.rand(5, dtype=DOUBLE)
    torch.testing.assert_close(lean.times(vector), usual.times(vector))
    torch.testing.assert_close(lean.diagonal, usual.diagonal)
    torch.testing.assert_close(lean.dense().matrix, usual.dense().matrix)


def test_factors_of_the_gain_do_not_depend_on_blocks() -> None:
    """Nor on whether the largest entry is known beforehand."""
    grad, gain = torch.randn(12, 5, dtype=DOUBLE), torch.rand(12, 5, dtype=DOUBLE)
    grad *= torch.logspace(-3, 3, 12, dtype=DOUBLE).unsqueeze(1)  # later blocks are larger
    squares = torch.rand(5, dtype=DOUBLE)
    known = Factors(squares, grad.abs().max())
    whole = known.add(grad, gain)
    found = Factors(squares)
    parts = torch.cat([found.add(grad[i : i + 5], gain[i : i + 5]) for i in (0, 5, 10)])
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(found.by_input, known.by_input)
