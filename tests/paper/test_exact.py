"""Proposition 1 and what became of it, by interior point: Eq. 3 against Eq. 5, 10 and 14."""

import sys

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn

from paper.explicit import per_sample_gradients
from primum.paper.chambolle_pock import PaperProblem
from primum.paper.exact import exact_update, exact_weights, reduced_weights

# Clarabel stops at relative gaps of 1e-8; values are compared relative to the harm before.
CLOSE = 1e-6


def harm(gradients: torch.Tensor, update: torch.Tensor) -> float:
    return (gradients @ update).clamp_min(0).sum().item()


def random_model(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-sample gradients of a small network and a step with momentum."""
    rng = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for param in model.parameters():
        nn.init.normal_(param, generator=rng)
    inputs = torch.randn(3 + seed, 4, generator=rng, dtype=torch.float64)
    labels = torch.randint(3, (3 + seed,), generator=rng)
    rows = per_sample_gradients(model, list(model.parameters()), inputs, labels)
    noise = torch.randn(rows.shape[1], generator=rng, dtype=torch.float64)
    history = noise / noise.norm() * rows.sum(0).norm() * 2
    return rows, -0.1 * (rows.sum(0) + history)


def of_training(moment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Explicit gradients of a captured head, its step and its gain. [B, D], [D], [D]."""
    moment = moment.double()
    rows = moment.output_gradients.unsqueeze(2) * moment.features.unsqueeze(1)
    gain = torch.ones_like(moment.step) * moment.gain
    return rows.flatten(1), moment.step.flatten(), gain.flatten()


def some(captured, optimizer: str) -> list:
    """Steps of one run, mostly early ones, where there is harm."""
    early = (0, 1, 2, 4, 8, 32)
    return [m for m in captured if (m.optimizer, m.batch) == (optimizer, 32) and m.number in early]


@pytest.mark.parametrize("radius", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(0, 18, 3))
def test_proposition_1_on_small_models(seed, radius):
    """The reduced problem, over w <= 0, attains the optimum of the one over all updates."""
    rows, step = random_model(seed)
    before, (update, least) = harm(rows, step), exact_update(rows, step, radius)
    weights, reduced = reduced_weights(rows, step, radius)
    assert reduced == pytest.approx(least, abs=CLOSE * before)
    assert harm(rows, update) == pytest.approx(least, abs=CLOSE * before)
    assert (update - step).norm() <= radius * step.norm() * (1 + 1e-6)
    built = step + rows.t() @ weights  # Eq. 4
    assert (weights <= 1e-9).all()
    assert harm(rows, built) == pytest.approx(least, abs=CLOSE * before)
    assert (built - step).norm() <= radius * step.norm() * (1 + 1e-6)
    assert least <= before


def test_the_small_models_are_not_trivial():
    """Harm is there, and part of it can be removed."""
    shares = []
    for seed in range(0, 18, 3):
        rows, step = random_model(seed)
        shares.append(exact_update(rows, step, 0.2)[1] / max(harm(rows, step), 1e-12))
    assert sum(0.1 < share < 0.99 for share in shares) >= 3


def test_proposition_1_on_captured_training(captured):
    for moment in some(captured, "SGD"):
        rows, step, _ = of_training(moment)
        least = exact_update(rows, step, 0.2)[1]
        assert reduced_weights(rows, step, 0.2)[1] == pytest.approx(
            least, abs=CLOSE * harm(rows, step)
        )


@pytest.mark.parametrize("seed", [3, 9, 15])
def test_the_closest_optimal_update_has_that_form(seed):
    """Proposition 1.2, for which the harm must be removable with room to spare (radius 3)."""
    rows, step = random_model(seed)
    least = exact_update(rows, step, 3.0)[1]
    moved = cp.Variable(len(step))
    kept = cp.sum(cp.pos(rows.numpy() @ (step.numpy() + moved))) <= least + 1e-7
    cp.Problem(cp.Minimize(cp.sum_squares(moved)), [kept]).solve(solver="CLARABEL")
    _, distance = nnls(rows.t().numpy(), -moved.value)
    assert distance <= 1e-3 * np.linalg.norm(moved.value)


@pytest.mark.parametrize("radius", [0.05, 0.2])
def test_proposition_1_holds_in_the_metric_of_the_optimizer(captured, radius):
    """The trust region measured by sum(delta^2 / gain): the proposition again, word for word."""
    for moment in some(captured, "AdamW"):
        rows, step, gain = of_training(moment)
        before = harm(rows, step)
        update, least = exact_update(rows, step, radius, gain)
        weights, reduced = reduced_weights(rows, step, radius, gain)
        assert reduced == pytest.approx(least, abs=CLOSE * before)
        built = step + gain * (rows.t() @ weights)
        assert harm(rows, built) == pytest.approx(least, abs=CLOSE * before)
        reach = radius * (step.square() / gain).sum().sqrt()
        for each in (update, built):
            assert ((each - step).square() / gain).sum().sqrt() <= reach * (1 + 1e-6)


def least_of_equation_14(rows, step, gain, radius) -> float:
    """Eq. 14 without its box: updates of the form step - gain * G' w in the Euclidean ball."""
    problem = PaperProblem(
        (rows * gain) @ rows.t(),
        (rows * gain**2) @ rows.t(),
        rows @ step,
        (radius * step.norm()).square(),
        max_extra_weight=1e6,
    )
    return exact_weights(problem)[1]


def test_for_adamw_with_the_euclidean_ball_proposition_1_fails():
    """One sample, two parameters, gains of 1 and 100: the form leaves only one direction.

    Within the ball harm falls by reach * |g| = 0.283, along gain * g by 0.202.
    """
    rows, step = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([1.0, 0.0]).double()
    gain = torch.tensor([1.0, 100.0]).double()
    least = exact_update(rows, step, 0.2)[1]
    assert least == pytest.approx(1 - 0.2 * 2**0.5, abs=1e-6)
    direction = gain * rows[0]
    of_the_form = 1 - 0.2 * (rows[0] @ direction / direction.norm()).item()
    weights, value = exact_weights(
        PaperProblem(
            (rows * gain) @ rows.t(),
            (rows * gain**2) @ rows.t(),
            rows @ step,
            torch.tensor(0.04).double(),
        )
    )
    assert value == pytest.approx(of_the_form, abs=1e-6)
    assert weights.item() < 2  # it is not the box that holds it back
    assert value - least > 0.08
    # In the metric of the optimizer nothing is lost.
    metric = [f(rows, step, 0.2, gain)[1] for f in (exact_update, reduced_weights)]
    assert metric[0] == pytest.approx(metric[1], abs=1e-6)


def test_for_adamw_with_the_euclidean_ball_training_loses_by_it(captured):
    """On captured steps Eq. 14 without its box removes less than Eq. 3 allows, every time."""
    told_apart = 0
    for moment in some(captured, "AdamW"):
        rows, step, gain = of_training(moment)
        before, least = harm(rows, step), exact_update(rows, step, 0.2)[1]
        if least > 1e-3 * before:  # else both remove everything
            assert least_of_equation_14(rows, step, gain, 0.2) > least + 1e-3 * before
            told_apart += 1
    assert told_apart >= 3


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_do_not_matter(scale):
    """Larger losses or a larger step: as much more harm. Clarabel's tolerances are absolute."""

    def boxed(rows: torch.Tensor, step: torch.Tensor, most: float) -> float:
        gram, reach_squared = rows @ rows.t(), (0.2 * step.norm()).square()
        return exact_weights(PaperProblem(gram, gram, rows @ step, reach_squared, most))[1]

    rows, step = random_model(9)
    before, expected = harm(rows, step), exact_update(rows, step, 0.2)[1]
    assert 0 < expected < 0.9 * before
    expected_boxed = boxed(rows, step, 0.01)
    assert expected_boxed > expected + 1e-3 * before
    for r, s, unit in ((rows * scale, step, 1 / scale), (rows, step * scale, scale)):
        for solve in (exact_update, reduced_weights):
            assert solve(r, s, 0.2)[1] / scale == pytest.approx(expected, abs=CLOSE * before)
        found = boxed(r, s, 0.01 * unit)
        assert found / scale == pytest.approx(expected_boxed, abs=CLOSE * before)


def test_exact_weights_is_equation_10_with_its_box():
    """Two samples, solved by hand: the ball allows 1 for the first, the box 0.5."""
    problem = PaperProblem(
        torch.eye(2).double(),
        torch.eye(2).double(),
        torch.tensor([3.0, -1.0]).double(),
        torch.tensor(1.0).double(),
        0.5,
    )
    weights, value = exact_weights(problem)
    assert weights[0].item() == pytest.approx(0.5, abs=1e-6)
    assert value == pytest.approx(2.5, abs=1e-6)
    unboxed = PaperProblem(problem.gram, problem.metric, problem.drift, problem.reach_squared, 9.0)
    assert exact_weights(unboxed)[1] == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("lr", [0.01, 3.0])
def test_equation_10_is_equation_5_in_other_units(lr):
    """w <- -w / lr turns the multipliers of Eq. 5 into extra weights; harm is per unit of lr."""
    rows, step = random_model(9)
    weights, least = reduced_weights(rows, lr * step, 0.2)
    gram, reach_squared = rows @ rows.t(), (0.2 / lr) ** 2 * (lr * step).square().sum()
    problem = PaperProblem(gram, gram, rows @ (lr * step) / lr, reach_squared, 1e3)
    _, boxed = exact_weights(problem)
    assert lr * boxed == pytest.approx(least, abs=CLOSE * harm(rows, lr * step))
    assert lr * problem.harm(-weights / lr) == pytest.approx(least, abs=1e-5 * lr)
    # Eq. 9: the loss weighted by 1 - w / lr has the gradient that makes the step of Eq. 4.
    plain = -lr * rows.sum(0)
    torch.testing.assert_close(-lr * rows.t() @ (1 - weights / lr), plain + rows.t() @ weights)


def test_no_radius_no_change():
    rows, step = random_model(9)
    before = harm(rows, step)
    assert exact_update(rows, step, 0.0)[1] == pytest.approx(before)
    assert reduced_weights(rows, step, 0.0)[1] == pytest.approx(before)
    problem = PaperProblem(rows @ rows.t(), rows @ rows.t(), rows @ step, torch.tensor(0.0))
    assert exact_weights(problem)[1] == pytest.approx(before, rel=1e-6)


def test_without_cvxpy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match=r"pip install cvxpy"):
        exact_update(torch.ones(1, 1), torch.ones(1), 0.2)
