"""Alg. 5 against its transcription, and what it promises: a feasible point."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paper import transcribed
from primum.paper.projection import project

SCALES = st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6])


def case(seed: int, batch: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weights = 3 * torch.randn(batch, generator=rng, dtype=torch.float64)
    rows = torch.randn(batch, batch, generator=rng, dtype=torch.float64)
    return weights, scale * rows @ rows.t()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), SCALES, SCALES, st.sampled_from([0.5, 2.0]))
def test_follows_algorithm_5_and_is_feasible(seed, batch, scale, r, most):
    weights, metric = case(seed, batch, scale)
    found = project(weights, metric, torch.tensor(r, dtype=torch.float64), most)
    by_hand = transcribed.approximate_projection(weights.numpy(), metric.numpy(), r, most)
    np.testing.assert_allclose(found.numpy(), by_hand, rtol=1e-12)
    assert (found >= 0).all()
    assert (found <= most).all()
    assert found @ metric @ found <= r * (1 + 1e-12)


def test_a_feasible_point_stays_where_it_is():
    weights, metric = torch.tensor([0.1, 0.2, 2.0]), torch.eye(3)
    assert torch.equal(project(weights, metric, torch.tensor(5.0)), weights)


def test_the_box_comes_first():
    """Shrinking first would leave (0.6, 0.8) here, and clipping after it may break the ball."""
    weights = torch.tensor([-30.0, 40.0])
    found = project(weights, torch.eye(2), torch.tensor(1.0))
    assert torch.equal(found, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("metric", [torch.zeros(2, 2), torch.eye(2), -torch.eye(2)])
def test_nothing_divides_by_zero(metric):
    """No reach, no metric, and a rank-r metric that is not positive."""
    assert torch.equal(project(torch.zeros(2), metric, torch.tensor(0.0)), torch.zeros(2))
    inside = project(torch.full((2,), 0.5), metric, torch.tensor(1.0))
    assert torch.equal(inside, torch.full((2,), 0.5))


def test_no_reach_no_weights():
    assert torch.equal(project(torch.ones(2), torch.eye(2), torch.tensor(0.0)), torch.zeros(2))
