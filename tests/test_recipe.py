"""The settings of the default recipe and what it does with them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import primum
from loops import batch, make, report_of, train
from primum.gram import MatrixFree
from primum.recipe import Primum, Recipe
from primum.update import Update

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("radius", -0.1, ValueError, r"radius must be >= 0 and finite, got -0\.1"),
        ("radius", NAN, ValueError, "radius must be >= 0 and finite, got nan"),
        ("radius", INF, ValueError, "radius must be >= 0 and finite, got inf"),
        ("radius", "0.2", TypeError, "radius must be a number, got '0.2'"),
        ("radius", None, TypeError, "radius must be a number, got None"),
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
    ],
)
def test_bad_settings(setting: str, value: Any, error: type[Exception], message: str) -> None:
    model, optimizer = make()
    for attach in (primum.attach, primum.observe):
        with pytest.raises(error, match=message):
            attach(model, optimizer, **{setting: value})
    assert not model[2]._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_numbers_of_numpy_are_numbers() -> None:
    model, optimizer = make()
    reducer = primum.attach(
        model,
        optimizer,
        radius=np.float32(0.2),
        max_extra_weight=np.float64(2),
        max_iters=np.int64(20),
    )
    train(model, optimizer, 1)
    assert report_of(reducer).fallbacks == 0
    assert report_of(reducer).extra_weights.max() > 0.01


def report(**settings: Any) -> primum.StepReport:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, **settings)
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
    w = report(max_extra_weight=most, radius=100).extra_weights
    assert w.max() <= most * (1 + 1e-12)
    assert w.max() > 0.5 * most


def test_iterations_are_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def solve(problem: primum.Problem, max_iters: int) -> primum.Solution:
        made.append(max_iters)
        return primum.solve(problem, max_iters)

    monkeypatch.setattr("primum.recipe.solve", solve)
    assert report(max_iters=100).gap < 1e-6
    report()
    assert made == [100, 20]


def test_radius_zero_is_measured_and_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primum.recipe.solve", None)
    plain = report(radius=0)
    assert plain.harm_before == plain.harm_after > 0
    assert plain.gap == 0
    assert not plain.extra_weights.any()


def test_keeps_no_state() -> None:
    recipe: Recipe = Primum()
    assert recipe.name == "primum"
    assert recipe.state_dict() == {}
    recipe.load_state_dict({})
    head = MatrixFree(torch.ones(2, 3), torch.ones(2, 1), 1.0)
    update = Update(torch.ones(1, 3), 1.0, 0.1)
    drift = torch.tensor([1.0, -1.0])
    one, other = (recipe(head, update, drift) for _ in range(2))
    assert torch.equal(one.extra_weights, other.extra_weights)
