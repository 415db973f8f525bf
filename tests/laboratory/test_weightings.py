"""Each control gives the weights it says it gives, and reports on those."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torchjd.aggregation import UPGrad

from lab.errors import UserError
from lab.weightings import (
    ByLoss,
    Normalised,
    Permuted,
    UpGrad,
    applied,
)
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Problem, Solution, StepProblem
from primum.kernel.recipe import Primum, Recipe

BATCH, INPUTS, OUTPUTS = 24, 5, 3
OWN = Primum(radius=0.3)


class Moment:
    """A head about to move, with explicit gradients beside."""

    def __init__(self, gain: Tensor | float = 1.0, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, INPUTS, generator=draw, dtype=torch.float64)
        g = torch.randn(BATCH, OUTPUTS, generator=draw, dtype=torch.float64) / BATCH
        self.explicit = (g.unsqueeze(2) * x.unsqueeze(1)).flatten(1)  # [B, d_out * d]
        history = 0.3 * torch.randn(OUTPUTS, INPUTS, generator=draw, dtype=torch.float64)
        step = -(g.t() @ x + history) * gain
        self.head = MatrixFree(x, g, gain)
        self.update = Update(step, gain, 0.1)
        self.drift = self.head.along(step)
        self.gain = gain

    @property
    def gram(self) -> Tensor:
        scale = torch.ones(OUTPUTS, INPUTS, dtype=torch.float64) * self.gain
        return (self.explicit * scale.flatten()) @ self.explicit.t()


def ask(recipe: Recipe, moment: Moment) -> Solution:
    update = moment.update
    return recipe(StepProblem(moment.head, moment.drift, update.norm(recipe.metric), update.lr))


@pytest.fixture
def moment() -> Moment:
    return Moment()


def test_permuted_shuffles_the_same_weights_at_each_step(moment: Moment) -> None:
    own = ask(OWN, moment).extra_weights
    recipe = Permuted(OWN, seed=1)
    first, second = (ask(recipe, moment) for _ in range(2))
    for found in (first, second):
        assert torch.equal(found.extra_weights.sort().values, own.sort().values)
    assert not torch.equal(first.extra_weights, own)
    assert not torch.equal(first.extra_weights, second.extra_weights)


def test_permuted_goes_on_where_it_was_put_aside(moment: Moment) -> None:
    recipe, later, other = Permuted(OWN, seed=1), Permuted(OWN, seed=1), Permuted(OWN, seed=2)
    ask(recipe, moment)
    later.load_state_dict(recipe.state_dict())
    other.load_state_dict(recipe.state_dict())
    first, second, third = (ask(each, moment).extra_weights for each in (recipe, later, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_normalised_has_mean_one_and_the_same_proportions(moment: Moment) -> None:
    own = 1 + ask(OWN, moment).extra_weights
    weights = 1 + ask(Normalised(OWN), moment).extra_weights
    assert float(own.mean()) > 1.001
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(weights / weights[0], own / own[0])


def test_by_loss_gives_the_largest_weight_to_the_largest_loss(moment: Moment) -> None:
    own = ask(OWN, moment).extra_weights
    recipe = ByLoss(OWN)
    recipe.losses = torch.rand(BATCH, generator=torch.Generator().manual_seed(3))
    weights = ask(recipe, moment).extra_weights
    assert torch.equal(weights.sort().values, own.sort().values)
    ranked = weights[recipe.losses.argsort()]
    assert bool((ranked[1:] >= ranked[:-1]).all())


def test_by_loss_needs_the_losses(moment: Moment) -> None:
    with pytest.raises(ValueError, match="needs each sample's loss"):
        ask(ByLoss(OWN), moment)


@pytest.mark.parametrize("weighted", [False, True])
def test_upgrad_is_torchjds_on_explicit_gradients(weighted: bool) -> None:
    gain: Tensor | float = 1.0
    if weighted:
        gain = (
            0.5 + torch.rand(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)).double()
        )
    moment = Moment(gain)
    weights = 1 + ask(UpGrad(mean_one=False), moment).extra_weights
    root = (torch.ones(OUTPUTS, INPUTS, dtype=torch.float64) * gain).sqrt().flatten()
    expected = UPGrad()(moment.explicit * root)  # of the gradients in the optimizer's metric
    torch.testing.assert_close((weights / BATCH) @ (moment.explicit * root), expected)
    assert float(weights.mean()) > 1.0


@pytest.mark.parametrize("missing", ["torchjd.aggregation", "quadprog"])
def test_upgrad_without_its_packages(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"upgrad needs torchjd and quadprog .*\.\[lab\]"):
        UpGrad(mean_one=False)


def test_upgrad_divided_by_its_mean(moment: Moment) -> None:
    published, scaled = (
        1 + ask(UpGrad(mean_one=one), moment).extra_weights for one in (False, True)
    )
    assert float(scaled.mean()) == pytest.approx(1.0)
    torch.testing.assert_close(scaled * published.mean(), published)


@pytest.mark.parametrize("name", ["permuted", "normalised", "loss-weighted", "upgrad"])
def test_the_report_is_on_the_weights_applied(name: str, moment: Moment) -> None:
    by_loss = ByLoss(OWN)
    by_loss.losses = torch.arange(BATCH)
    recipes = [Permuted(OWN, 0), Normalised(OWN), by_loss, UpGrad(mean_one=False)]
    recipe = next(each for each in recipes if each.name == name)
    found = ask(recipe, moment)
    expected = moment.drift - moment.gram @ found.extra_weights
    torch.testing.assert_close(found.drift_after, expected)
    assert bool(found.lower_bound.isnan())  # nothing is proven


def test_values_that_are_not_finite_give_no_weights(moment: Moment) -> None:
    gram = moment.gram
    gram[0, 0] = torch.nan
    found = applied(Problem.dense(gram, moment.drift, 1.0), torch.ones(BATCH).double(), 0)
    assert not found.extra_weights.any()
    assert float(found.objective) == torch.inf


def test_the_moment_is_what_it_says(moment: Moment) -> None:
    """The oracle of this file: gradients of a linear layer, one sample at a time."""
    x, g = moment.head.features, moment.head.output_gradients
    weight = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)

    def loss(w: Tensor, row: Tensor, pull: Tensor) -> Tensor:
        return (w @ row) @ pull

    by_sample = vmap(grad(loss), in_dims=(None, 0, 0))(weight, x, g)
    torch.testing.assert_close(by_sample.flatten(1), moment.explicit)
    torch.testing.assert_close(moment.head.dense().matrix, moment.gram)
