"""Problems at the edge of float32, judged in float64: weights never make a step worse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import Literal
from primum import Problem, solve
from primum.kernel import solver
from primum.kernel.gram import MatrixFree

SEEDS = range(500, 900)
TINY = 1e-37  # near the smallest numbers of float32
exponents = st.floats(-8, 8)


@st.composite
def problems(draw: Any) -> tuple[MatrixFree, Tensor, Tensor]:
    """Factors, drift and reach of one step, all in float32."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, inputs, outputs = (
        draw(st.integers(1, 40)),
        draw(st.integers(1, 70)),
        draw(st.integers(1, 10)),
    )
    x, g = torch.randn(batch, inputs, generator=rng), torch.randn(batch, outputs, generator=rng)
    spread = draw(st.sampled_from([0, 0, 8, 16]))  # decades between the samples' gradients
    g *= 10.0 ** (spread * (torch.rand(batch, 1, generator=rng) - 0.5))
    if draw(st.booleans()):  # nearly the same features
        x = 1e-4 * x + torch.randn(1, inputs, generator=rng)
    if draw(st.booleans()):
        g[torch.rand(batch, generator=rng) < 0.3] = 0
    if draw(st.booleans()):
        repeated = torch.randint(batch, (batch,), generator=rng)
        x, g = x[repeated], g[repeated]
    if draw(st.booleans()):  # opposite gradients, almost
        half = batch // 2
        x[half : 2 * half] = x[:half]
        g[half : 2 * half] = -g[:half] * (1 + 10.0 ** draw(st.floats(-8, -2)))
    g *= 10.0 ** draw(exponents)
    gain: Tensor | float = 1.0
    if draw(st.booleans()):
        gain = (torch.rand(outputs, inputs, generator=rng) + 0.01) * 10.0 ** draw(st.floats(-4, 4))
    gram = MatrixFree(x, g, gain)
    step = torch.randn(outputs, inputs, generator=rng)
    kind = draw(st.sampled_from(["step", "any", "tiny", "honest"]))
    if kind == "step":
        drift = gram.along(step * 10.0 ** draw(exponents))
    elif kind == "any":
        drift = torch.randn(batch, generator=rng) * 10.0 ** draw(exponents)
    elif kind == "tiny":  # beside large gradients
        size = gram.diagonal.max() * 10.0 ** draw(st.floats(-15, -2))
        drift = torch.randn(batch, generator=rng) * size
    else:
        drift = gram.times(torch.ones(batch)).neg()
    trace = gram.diagonal.sum().sqrt()
    reach = trace * 10.0 ** draw(st.floats(-9, 1))
    return gram, drift, reach


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("form", ["dense", "matrix-free"])
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=problems())
def test_judged_in_float64(
    data: tuple[MatrixFree, Tensor, Tensor], form: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors, drift, reach = data
    if path == "device":  # a fixed number of iterations, judged at the end
        monkeypatch.setattr(solver, "on_host", lambda value: False)
    gram = factors.dense() if form == "dense" else factors
    if not (gram.diagonal.isfinite().all() and drift.isfinite().all()):
        return
    solution = solve(Problem(gram, drift, reach), 12, 0.005)
    weights = solution.extra_weights
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights <= 2 * (1 + 1e-6)).all()
    literal = Literal.of(factors, drift, reach)
    assert literal.length(weights) <= float(reach) * (1 + 1e-5) + TINY
    objective = literal.objective(weights)
    assert objective <= literal.harm * (1 + 1e-6) + TINY
    largest = max(objective, literal.harm)
    assert float(solution.lower_bound) <= objective + 1e-6 * largest + TINY


def cancelling(seed: int) -> tuple[MatrixFree, Tensor, Tensor]:
    """Opposite gradients whose products are rounding errors beside the drift."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=rng))

    batch, inputs, outputs = (int(uniform(*ends)) for ends in ((2, 40), (2, 70), (1, 6)))
    x, g = torch.randn(batch, inputs, generator=rng), torch.randn(batch, outputs, generator=rng)
    x = x * 10.0 ** uniform(-6, -2) + torch.randn(1, inputs, generator=rng)
    g = g * 10.0 ** uniform(-6, -2) + torch.randn(1, outputs, generator=rng)
    g *= torch.where(torch.rand(batch, 1, generator=rng) < 0.5, 1.0, -1.0)
    gram = MatrixFree(x, g, 1.0)
    drift = torch.randn(batch, generator=rng) * gram.diagonal.max() * 10.0 ** uniform(-15, -9)
    return gram, drift, gram.diagonal.sum().sqrt() * 10.0 ** uniform(-9, -4)


def worst(path: str, monkeypatch: pytest.MonkeyPatch, seeds: range = SEEDS) -> float:
    """The largest objective over that of zero weights."""
    if path == "device":
        monkeypatch.setattr(solver, "on_host", lambda value: False)
    ratios = []
    for seed in seeds:
        factors, drift, reach = cancelling(seed)
        gram = factors.dense() if seed % 2 else factors
        literal = Literal.of(factors, drift, reach)
        weights = solve(Problem(gram, drift, reach), 12, 0.005).extra_weights
        if literal.harm > 0:
            ratios.append(literal.objective(weights) / literal.harm)
    return max(ratios)


@pytest.mark.parametrize("path", ["host", "device"])
def test_where_products_cancel_zero_weights_win(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(path, monkeypatch) <= 1 + 1e-6

    class NoAllowance(solver._Certificate):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._error = 0.0

    monkeypatch.setattr(solver, "_Certificate", NoAllowance)
    assert worst(path, monkeypatch) > 1.1  # these are problems that need it
