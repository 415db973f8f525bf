"""Feasible, and certified, for any multipliers and any batch. Everything is checked in float64."""

from __future__ import annotations

import math

import cvxpy
import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import Literal, clarabel
from primum import Problem, Solution, solve
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.kernel.solver import _AtOnce

SCALES = st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6])
KINDS = (
    "random",
    "duplicates",
    "opposite",
    "almost opposite",
    "zero gradients",
    "all zero",
    "mixed scales",
    "one direction",
)


class Batch:
    """A head, a step, and what `Problem` and the oracle make of them."""

    def __init__(
        self,
        *,
        seed: int = 0,
        batch: int = 4,
        inputs: int = 3,
        outputs: int = 2,
        positions: int = 0,
        kind: str = "random",
        scale: float = 1.0,
        step_scale: float = 1.0,
        elementwise: bool = False,
        radius: float = 0.2,
        most: float = 2.0,
        dense: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        middle = (positions,) if positions else ()
        x, g = randn(batch, *middle, inputs), randn(batch, *middle, outputs)
        half = batch // 2
        if kind == "duplicates":
            x[half : 2 * half], g[half : 2 * half] = x[:half], g[:half]
        elif kind in ("opposite", "almost opposite"):
            x[half : 2 * half], g[half : 2 * half] = x[:half], -g[:half]
            if kind == "almost opposite":
                g[half : 2 * half] *= 1 + 1e-6 * randn(half, *(1,) * len(middle), 1)
        elif kind == "zero gradients":
            g[::2] = 0
        elif kind == "all zero":
            g[:] = 0
        elif kind == "mixed scales":
            g *= 10 ** (3 * randn(batch, *(1,) * len(middle), 1)).clamp(-6, 6)
        elif kind == "one direction":
            x[:], g[:] = x[:1].clone(), g[:1].clone()
            g *= randn(batch, *(1,) * len(middle), 1)
        gain: Tensor | float = 1.9
        if elementwise:
            gain = (10 ** randn(outputs, inputs).clamp(-2, 2)).to(dtype)
        x, g = x.to(dtype), (g * scale).to(dtype)
        self.head = MatrixFree(x, g, gain)
        pushed = g.flatten(0, -2).t() @ x.flatten(0, -2)
        memory = (step_scale * randn(outputs, inputs)).to(dtype)
        self.step = -gain * pushed - memory
        drift = self.head.along(self.step)
        reach = radius * Update(self.step, gain, 1.0).norm("gain")
        gram = self.head.dense() if dense else self.head
        self.problem = Problem(gram, drift, reach, most)
        self.literal = Literal.of(self.head, drift, reach, most)
        self.rng, self.dtype = rng, dtype
        # A length of zero is taken for the smallest number there is, under the root.
        self.least = most * torch.finfo(dtype).tiny
        # Longest chain of roundings behind one number: a product, a sum over the batch.
        self.terms = 4 * (batch + max(positions, 1) * (inputs + outputs))

    def multipliers(self, count: int) -> Tensor:
        """Points of the unit cube: inside, on faces, in corners."""
        inside = torch.rand(count, len(self.problem.drift), generator=self.rng)
        corner = torch.rand(inside.shape, generator=self.rng)
        on_face = torch.where(corner < 0.3, 0.0, torch.where(corner > 0.7, 1.0, inside))
        return on_face.to(self.dtype)


def recover(multipliers: Tensor, problem: Problem, iterations: int = 0) -> Solution:
    """The best of these dual points, zero weights not among them. [k, B]."""
    visited = _AtOnce(problem)
    visited._points = list(multipliers)
    visited._products = [problem.gram.times(row) for row in multipliers]
    return visited.best(iterations)


batches = st.builds(
    Batch,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 9),
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 3),
    positions=st.sampled_from([0, 0, 3]),
    kind=st.sampled_from(KINDS),
    scale=SCALES,
    step_scale=SCALES,
    elementwise=st.booleans(),
    radius=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    most=st.sampled_from([0.5, 2.0, 100.0]),
    dense=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
many = settings(max_examples=150, deadline=None, derandomize=True)
few = settings(many, max_examples=40)  # where each one is a run of Clarabel


def check(batch: Batch, solution: Solution) -> None:
    """What holds for any answer: feasible, honest about its value, and the value is a value."""
    w, literal = solution.extra_weights, batch.literal
    eps = torch.finfo(batch.dtype).eps
    assert w.dtype == batch.dtype
    assert w.isfinite().all()
    assert (w >= 0).all()
    assert (w <= literal.most * (1 + 2 * eps)).all()
    assert literal.length(w) ** 2 <= literal.reach**2 * (1 + 1e-5)
    error = literal.rounding(w, eps, batch.terms) + batch.least
    assert solution.objective.item() == pytest.approx(literal.objective(w), rel=1e-5, abs=error)
    off = (solution.drift_after - literal.after(w)).abs()
    assert off.max() <= error
    assert solution.lower_bound <= solution.objective + error


@many
@given(batch=batches, count=st.integers(1, 3))
def test_any_multipliers_give_a_feasible_point(batch: Batch, count: int) -> None:
    solution = recover(batch.multipliers(count), batch.problem, iterations=7)
    check(batch, solution)
    assert solution.iterations == 7


@many
@given(batch=batches, seed=st.integers(0, 1000))
def test_any_multipliers_give_a_lower_bound(batch: Batch, seed: int) -> None:
    """Weak duality, without a solver: no feasible point there is gets below it."""
    gamma = batch.multipliers(1)
    solution = recover(gamma, batch.problem)
    rng = torch.Generator().manual_seed(seed)
    literal, size = batch.literal, gamma.shape[1]
    for sparse in (0.0, 0.5):
        w = torch.rand(size, generator=rng, dtype=torch.float64).clamp_min(sparse) - sparse
        length = literal.length(w)
        w = w * min(literal.most, literal.reach / length if length > 0 else 0.0)
        error = literal.rounding(gamma[0] * literal.most, torch.finfo(batch.dtype).eps, batch.terms)
        assert solution.lower_bound.item() <= literal.objective(w) + error


@many
@given(batch=batches)
def test_solutions_are_feasible_and_no_worse_than_none(batch: Batch) -> None:
    solution = solve(batch.problem)
    check(batch, solution)
    assert solution.objective <= batch.problem.drift.clamp_min(0).sum() + batch.least


@few
@given(batch=batches)
@example(batch=Batch(batch=1))
@example(batch=Batch(batch=6, kind="opposite", scale=1e6))
@example(batch=Batch(batch=40, inputs=2, outputs=2))
@example(batch=Batch(batch=40, inputs=2, outputs=2, dense=False, elementwise=True))
def test_the_optimum_lies_between_bound_and_objective(batch: Batch) -> None:
    solution = solve(batch.problem)
    try:
        optimum = clarabel(batch.literal)
    except cvxpy.SolverError:  # some gradients a trillion times as long as others
        reject()
    eps = torch.finfo(batch.dtype).eps
    error = batch.literal.rounding(solution.extra_weights, eps, batch.terms)
    error = max(error, batch.literal.rounding(optimum.weights, eps, batch.terms))
    assert solution.lower_bound.item() <= optimum.upper + error
    assert optimum.lower <= solution.objective.item() + error


# --- one by one -----------------------------------------------------------------------------------


def test_one_sample_by_hand():
    """gram = 1, drift = 1: harm falls by w, the penalty is w^2 / 4; the reach stops it at 0.5."""
    for reach, weight in ((0.5, 0.5), (10.0, 1.0)):
        problem = Problem.dense(torch.ones(1, 1), torch.ones(1), reach)
        solution = solve(problem)
        assert solution.extra_weights.item() == pytest.approx(weight, rel=1e-5)
        assert solution.objective.item() == pytest.approx(1 - weight + weight**2 / 4, rel=1e-5)
        assert solution.lower_bound.item() == pytest.approx(1 - weight + weight**2 / 4, rel=1e-5)
        assert solution.drift_after.item() == pytest.approx(1 - weight, abs=1e-5)


def test_the_largest_weight_is_reached_and_not_passed():
    """Too much harm to remove: each sample gets all the weight there is."""
    for most in (0.5, 2.0, 3.0):
        problem = Problem.dense(torch.eye(3), torch.full((3,), 100.0), 1e3, most)
        torch.testing.assert_close(solve(problem).extra_weights, torch.full((3,), most))


def test_opposite_gradients_cancel_and_stay_feasible():
    """gram @ gamma is exactly 0 and the reach is not used: nothing may divide by that."""
    gram = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    problem = Problem.dense(gram, torch.tensor([0.5, 0.5]), trust_radius=0.1)
    solution = recover(torch.ones(1, 2), problem)
    assert solution.extra_weights.isfinite().all()
    assert (solution.extra_weights <= 2.0).all()
    assert solution.objective.item() == pytest.approx(1.0, abs=1e-5)
    assert solution.lower_bound <= 1.0
    # Bounding the rounding error costs a little; leaving the step alone does not.
    assert solve(problem).objective == 1.0


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "matrix-free"])
@pytest.mark.parametrize("apart", [1e-6, 1e-5, 1e-4, 1e-3])
def test_almost_opposite_gradients_stay_within_reach(apart, dense):
    """In float32, the length of what is left of them is rounding error, and may come out as 0."""
    for seed in range(30):
        rng = torch.Generator().manual_seed(seed)
        x, g = torch.randn(1, 5, generator=rng), torch.randn(1, 3, generator=rng)
        head = MatrixFree(torch.cat([x, x]), torch.cat([g, -g * (1 + apart)]), 1.0)
        gram = head.dense() if dense else head
        drift, reach = torch.tensor([0.5, 0.5]), torch.tensor(0.1 * apart)
        solution = recover(torch.ones(1, 2), Problem(gram, drift, reach))
        literal = Literal.of(head, drift, reach)
        assert literal.length(solution.extra_weights) ** 2 <= literal.reach**2 * (1 + 1e-5)
        assert solution.lower_bound.item() <= literal.objective(torch.zeros(2))


def test_the_best_point_is_taken_and_the_best_bound():
    gram, drift = torch.eye(2), torch.tensor([1.0, -1.0])
    problem = Problem.dense(gram, drift, 0.5)
    gamma = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    each = [recover(row.unsqueeze(0), problem) for row in gamma]
    best = recover(gamma, problem)
    assert best.objective == min(s.objective for s in each)
    assert best.lower_bound == max(s.lower_bound for s in each)
    assert torch.equal(best.extra_weights, each[1].extra_weights)
    assert torch.equal(best.drift_after, each[1].drift_after)


def test_matrix_free_is_the_same_problem():
    batch = Batch(batch=8, elementwise=True, dtype=torch.float64)
    head, drift, reach = batch.head, batch.problem.drift, float(batch.problem.trust_radius)
    free = Problem.matrix_free(head.features, head.output_gradients, head.gain, drift, reach)
    assert isinstance(free.gram, MatrixFree)
    assert free.trust_radius.dtype == torch.float64
    assert free.max_extra_weight == 2.0
    torch.testing.assert_close(free.gram.times(drift), batch.literal.gram @ drift)
    torch.testing.assert_close(free.gram.diagonal, batch.literal.gram.diagonal())


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"gram must be \[B, B\] and drift \[B\], got \[2, 3\]"):
        Problem.dense(torch.zeros(2, 3), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"got \[3, 3\] and \[2\]"):
        Problem.dense(torch.zeros(3, 3), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"got \[2, 2\] and \[2, 1\]"):
        Problem.dense(torch.zeros(2, 2), torch.zeros(2, 1), 1.0)
    with pytest.raises(ValueError, match=r"must agree in all but the last dimension, got \[4, 2\]"):
        Problem.matrix_free(torch.zeros(4, 2), torch.zeros(3, 2), 1.0, torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match=r"got \[4\] and \[4\]"):
        Problem.matrix_free(torch.zeros(4), torch.zeros(4), 1.0, torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match=r"drift must be \[B\], got \[3\] for 4 samples"):
        Problem.matrix_free(torch.zeros(4, 2), torch.zeros(4, 3), 1.0, torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"gain must be a number or \[3, 2\], got \[2, 3\]"):
        Problem.matrix_free(
            torch.zeros(4, 2), torch.zeros(4, 3), torch.ones(2, 3), torch.zeros(4), 1.0
        )


@pytest.mark.parametrize("most", [0.0, -1.0, math.nan])
def test_a_largest_weight_that_is_not_positive_is_refused(most):
    with pytest.raises(ValueError, match=f"max_extra_weight must be > 0, got {most}"):
        Problem.dense(torch.zeros(2, 2), torch.zeros(2), 1.0, most)
    with pytest.raises(ValueError, match=f"max_extra_weight must be > 0, got {most}"):
        Problem.matrix_free(torch.ones(2, 1), torch.ones(2, 1), 1.0, torch.zeros(2), 1.0, most)
