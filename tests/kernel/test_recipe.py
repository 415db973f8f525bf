"""The settings of the default recipe and what it does with them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import primum
from conftest import Moment
from loops import batch, make, report_of, train
from oracles import ask
from primum import Problem, Solution
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.kernel.recipe import Primum

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("radius", -0.1, ValueError, r"radius must be >= 0 and finite, got -0\.1"),
        ("radius", NAN, ValueError, "radius must be >= 0 and finite, got nan"),
        ("radius", INF, ValueError, "radius must be >= 0 and finite, got inf"),
        ("radius", "0.2", TypeError, "radius must be a number, got '0.2'"),
        ("radius", True, TypeError, "radius must be a number, got True"),
        ("radius", 1j, TypeError, "radius must be a number, got 1j"),
        ("radius", torch.ones(2), TypeError, "radius must be a number, got tensor"),
        ("max_extra_weight", -1, ValueError, "max_extra_weight must be >= 0 and finite, got -1"),
        ("max_extra_weight", 0, ValueError, "must be > 0, got 0; for plain training use radius=0"),
        ("max_extra_weight", NAN, ValueError, "max_extra_weight must be >= 0 and finite, got nan"),
        ("max_extra_weight", INF, ValueError, "max_extra_weight must be >= 0 and finite, got inf"),
        ("max_extra_weight", [], TypeError, r"max_extra_weight must be a number, got \[\]"),
        ("max_iters", 0, ValueError, "max_iters must be >= 1 and finite, got 0"),
        ("max_iters", -3, ValueError, "max_iters must be >= 1 and finite, got -3"),
        ("max_iters", 2.5, TypeError, r"max_iters must be a whole number, got 2\.5"),
        ("max_iters", 20.0, TypeError, r"max_iters must be a whole number, got 20\.0"),
        ("max_iters", NAN, TypeError, "max_iters must be a whole number, got nan"),
        ("max_iters", None, TypeError, "max_iters must be a whole number, got None"),
        ("max_iters", True, TypeError, "max_iters must be a whole number, got True"),
        ("tolerance", -0.1, ValueError, r"tolerance must be >= 0 and finite, got -0\.1"),
        ("tolerance", NAN, ValueError, "tolerance must be >= 0 and finite, got nan"),
        ("tolerance", "1%", TypeError, "tolerance must be a number, got '1%'"),
    ],
)
def test_bad_settings(setting: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Primum(**{setting: value})


def test_attach_with_a_bad_setting_leaves_nothing_behind() -> None:
    model, optimizer = make()
    for attach in (primum.attach, primum.observe):
        with pytest.raises(ValueError, match="radius must be"):
            attach(model, optimizer, radius=-0.1)
    assert not model[2]._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_numbers_of_numpy_are_numbers() -> None:
    model, optimizer = make()
    recipe = Primum(radius=np.float32(0.2), max_extra_weight=np.float64(2), max_iters=np.int64(20))
    reducer = primum.attach(model, optimizer, recipe=recipe)
    train(model, optimizer, 1)
    assert report_of(reducer).fallbacks == 0
    assert report_of(reducer).extra_weights.max() > 0.01


def report(**settings: Any) -> primum.StepReport:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, recipe=Primum(**settings))
    inputs, labels = batch(0, 24)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return report_of(reducer)


def test_radius_says_how_far_the_step_is_bent() -> None:
    harms = [float(report(radius=r).harm_after) for r in (0, 0.05, 0.2, 0.8)]
    assert harms == sorted(harms, reverse=True)
    assert harms[0] == report().harm_before
    assert harms[-1] < 0.8 * harms[0]


@pytest.mark.parametrize("most", [0.01, 0.3, 5])
def test_no_weight_is_larger_than_allowed(most: float) -> None:
    with pytest.warns(RuntimeWarning, match="radius=100 lets the weights change a step by more"):
        w = report(max_extra_weight=most, radius=100).extra_weights
    assert w.max() <= most * (1 + 1e-12)
    assert w.max() > 0.5 * most


def test_iterations_are_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, float]] = []

    def solve(problem: Problem, max_iters: int, tolerance: float) -> Solution:
        made.append((max_iters, tolerance))
        return primum.solve(problem, max_iters, tolerance)

    monkeypatch.setattr("primum.kernel.recipe.solve", solve)
    assert report(max_iters=100, tolerance=0).gap < 1e-6
    report()
    assert made == [(100, 0), (12, 0.005)]


def test_the_tolerance_is_kept(captured: list[Moment]) -> None:
    moment = next(m for m in captured if m.number > 0 and m.drift.max() > 0).double()
    update, harm = Update(moment.step, moment.gain, 0.1), moment.drift.clamp_min(0).sum()
    iterations = []
    for tolerance in (0.3, 0.01, 1e-4):
        recipe = Primum(max_iters=500, tolerance=tolerance)
        solution = ask(recipe, moment.gram, update, moment.drift)
        assert solution.objective - solution.lower_bound <= tolerance * harm * (1 + 1e-9)
        iterations.append(solution.iterations)
    assert iterations == sorted(iterations)
    assert iterations[0] < iterations[2] < 500


def test_the_reach_is_the_radius_times_the_size_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the metric of the gain: `radius * sqrt(sum(step^2 / gain))`, for each kind of gain."""
    rng = torch.Generator().manual_seed(0)
    x, g = (torch.randn(6, n, generator=rng, dtype=torch.float64) for n in (4, 3))
    step = torch.randn(3, 4, generator=rng, dtype=torch.float64)
    elementwise = torch.rand(3, 4, generator=rng, dtype=torch.float64) + 0.1
    problems: list[Problem] = []

    def solve(problem: Problem, *args: Any) -> Solution:
        problems.append(problem)
        return primum.solve(problem, *args)

    monkeypatch.setattr("primum.kernel.recipe.solve", solve)
    for gain in (2.5, torch.tensor(2.5).double(), elementwise[:1], elementwise):
        gram = MatrixFree(x, g, gain)
        drift = gram.along(step)
        ask(Primum(radius=0.3, max_extra_weight=1.5), gram, Update(step, gain, 0.1), drift)
        problem = problems.pop()
        expected = 0.3 * (step**2 / gain).sum().sqrt()
        torch.testing.assert_close(problem.trust_radius, expected, rtol=1e-12, atol=0)
        assert problem.drift is drift
        assert problem.gram is gram
        assert problem.max_extra_weight == 1.5


def test_what_the_pipeline_is_asked_for() -> None:
    """Products for the cost model, and the metric of the size."""
    assert Primum().metric == "gain"
    assert Primum(max_iters=7).products == 8
    assert Primum(radius=0).products == 0


def test_radius_zero_is_measured_and_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primum.kernel.recipe.solve", None)
    plain = report(radius=0)
    assert plain.harm_before == plain.harm_after > 0
    assert plain.gap == 0
    assert not plain.extra_weights.any()


def test_keeps_no_state() -> None:
    recipe = Primum()
    assert recipe.name == "primum"
    assert recipe.state_dict() == {}
    recipe.load_state_dict({})
    gram = MatrixFree(torch.ones(2, 3), torch.ones(2, 1), 1.0)
    update = Update(torch.ones(1, 3), 1.0, 0.1)
    drift = torch.tensor([1.0, -1.0])
    one, other = (ask(recipe, gram, update, drift) for _ in range(2))
    assert torch.equal(one.extra_weights, other.extra_weights)
