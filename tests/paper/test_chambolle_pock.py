"""Alg. 6 and Alg. 7 against their transcription, and against Clarabel."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paper import transcribed
from primum.kernel.gram import MatrixFree
from primum.paper.chambolle_pock import PaperProblem, chambolle_pock, warm_start
from primum.paper.exact import exact_weights
from primum.paper.low_rank import gram_matrices


def random_problem(seed: int, same: bool = False) -> tuple[PaperProblem, torch.Tensor]:
    """Samples whose gradient norms differ by an order of magnitude; some harmed, some not."""
    rng = torch.Generator().manual_seed(seed)
    batch, size = 3 + seed % 20, 30
    rows = torch.randn(batch, size, generator=rng, dtype=torch.float64)
    rows *= torch.rand(batch, 1, generator=rng, dtype=torch.float64) + 0.1
    gain = torch.rand(size, generator=rng, dtype=torch.float64) + 0.1
    step = -rows.sum(0) * gain + 3 * torch.randn(size, generator=rng, dtype=torch.float64)
    gram = (rows * gain) @ rows.t()
    metric = gram if same else (rows * gain**2) @ rows.t()
    reach_squared = (0.2 * (1 + seed % 4) * step.norm()).square()
    problem = PaperProblem(gram, metric, rows @ step, reach_squared)
    return problem, torch.linalg.eigvalsh(gram)[-1]


def from_training(moment) -> tuple[PaperProblem, torch.Tensor]:
    moment = moment.double()
    head = MatrixFree(moment.features, moment.output_gradients, moment.gain, has_bias=True)
    gram, metric = gram_matrices(head, 5)
    reach_squared = 0.04 * moment.step.square().sum()
    return PaperProblem(gram, metric, moment.drift, reach_squared), torch.linalg.eigvalsh(gram)[-1]


def by_hand(problem: PaperProblem, norm: torch.Tensor, **options) -> tuple[np.ndarray, int]:
    return transcribed.chambolle_pock(
        problem.gram.numpy(),
        problem.metric.numpy(),
        problem.drift.numpy(),
        problem.reach_squared.item(),
        norm.item(),
        t=problem.max_extra_weight,
        **options,
    )


SETTINGS = [
    ({}, {}),
    ({"tol": 0.0}, {"tol": 0.0}),
    ({"tol": 1e-2}, {"tol": 1e-2}),
    ({"warm_up": 0}, {"I_PGD": 0}),
    ({"warm_up": 3, "iterations": 20}, {"I_PGD": 3, "I_solver": 20}),
    ({"warm_up": 10, "iterations": 10}, {"I_PGD": 10, "I_solver": 10}),
    ({"safety": 0.9, "relaxation": 1.0}, {"safety": 0.9, "theta": 1.0}),
]


@pytest.mark.parametrize(("ours", "theirs"), SETTINGS, ids=lambda options: str(options))
def test_follows_algorithm_7(ours, theirs):
    early = 0
    for seed in range(40):
        problem, norm = random_problem(seed, same=seed % 2 == 0)
        weights, made = chambolle_pock(problem, norm, **ours)
        expected, iterations = by_hand(problem, norm, **theirs)
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-10)
        assert made == iterations
        early += iterations < ours.get("iterations", 50)
    if ours in ({}, {"tol": 1e-2}):
        assert early > 0  # some really stop early


def test_follows_algorithm_7_on_captured_training(captured):
    for moment in captured:
        if moment.batch == 512 and moment.number % 32:
            continue  # for time's sake
        problem, norm = from_training(moment)
        weights, made = chambolle_pock(problem, norm)
        expected, iterations = by_hand(problem, norm)
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-8)
        assert made == iterations


def test_the_tolerance_that_the_paper_does_not_give_costs_nothing(captured):
    """What is removed with ours, against never stopping early, in units of the harm before."""
    for moment in captured:
        if moment.batch < 512:
            problem, norm = from_training(moment)
            stopped, never = (chambolle_pock(problem, norm, **t)[0] for t in ({}, {"tol": 0.0}))
            assert problem.harm(stopped) <= problem.harm(never) + 0.01 * problem.harm(never * 0)


@pytest.mark.parametrize("iterations", [0, 1, 10])
def test_warm_start_follows_algorithm_6(iterations):
    for seed in range(20):
        problem, norm = random_problem(seed)
        weights, active = warm_start(problem, 0.5 / norm, iterations)
        expected = transcribed.pgd_warm_start(
            problem.gram.numpy(),
            problem.metric.numpy(),
            problem.drift.numpy(),
            problem.reach_squared.item(),
            iterations,
            0.5 / norm.item(),
        )
        np.testing.assert_allclose(weights.numpy(), expected[0], atol=1e-12)
        np.testing.assert_array_equal(active.numpy(), expected[1])


def test_where_the_paper_breaks_off_nothing_changes_any_more():
    problem, norm = random_problem(3)
    weights, made = chambolle_pock(problem, norm, tol=1e-2)
    longer, same = chambolle_pock(problem, norm, tol=1e-2, iterations=400)
    assert made < 50
    assert same == made
    assert torch.equal(weights, longer)


def test_answers_are_feasible_and_no_better_than_the_optimum(captured):
    """And no worse than doing nothing; how much they attain is for `lab/bench/solvers.py`."""
    for moment in captured:
        if moment.batch == 32:
            problem, norm = from_training(moment)
            weights, _ = chambolle_pock(problem, norm)
            before, after = problem.harm(torch.zeros_like(weights)), problem.harm(weights)
            optimum = exact_weights(problem)[1]
            assert (weights >= 0).all()
            assert (weights <= 2).all()
            assert weights @ problem.metric @ weights <= problem.reach_squared * (1 + 1e-9)
            assert optimum - 1e-6 * before <= after <= before


def test_reaches_the_optimum_where_the_theory_covers_it():
    """With the ball out of reach Alg. 5 is the projection onto the box: iterations lead there."""
    for seed in (2, 6):
        problem, norm = random_problem(seed, same=True)
        boxed = PaperProblem(problem.gram, problem.metric, problem.drift, norm * 1e6)
        weights, _ = chambolle_pock(boxed, norm, iterations=1500, tol=0.0, relaxation=1.0)
        before, optimum = boxed.harm(torch.zeros_like(weights)), exact_weights(boxed)[1]
        assert boxed.harm(weights) <= optimum + 1e-3 * before
        assert optimum < 0.9 * before


@pytest.mark.parametrize("drift", [-1.0, 0.0])
def test_nobody_harmed_nobody_weighted(drift):
    problem, norm = random_problem(1)
    unharmed = PaperProblem(
        problem.gram, problem.metric, torch.full_like(problem.drift, drift), problem.reach_squared
    )
    assert torch.equal(chambolle_pock(unharmed, norm)[0], torch.zeros_like(problem.drift))


def test_a_matrix_of_zeros_gives_no_weights():
    zero = torch.zeros(3, 3)
    problem = PaperProblem(zero, zero, torch.tensor([1.0, -1.0, 0.0]), torch.tensor(1.0))
    weights, _ = chambolle_pock(problem, torch.tensor(0.0))
    assert torch.equal(weights, torch.zeros(3))


def test_permuting_the_samples_permutes_the_weights():
    problem, norm = random_problem(8)
    order = torch.randperm(len(problem.drift), generator=torch.Generator().manual_seed(0))
    permuted = PaperProblem(
        problem.gram[order][:, order],
        problem.metric[order][:, order],
        problem.drift[order],
        problem.reach_squared,
    )
    weights = chambolle_pock(problem, norm)[0][order]
    torch.testing.assert_close(chambolle_pock(permuted, norm)[0], weights, rtol=0, atol=1e-12)


class NoSync(TorchDispatchMode):
    """Raises where a value would have to travel to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.name()
        assert "nonzero" not in func.name()
        return func(*args, **(kwargs or {}))


def test_waits_for_no_device():
    problem, norm = random_problem(5)
    with NoSync():
        chambolle_pock(problem, norm)
        with pytest.raises(AssertionError):
            bool(norm > 0)
