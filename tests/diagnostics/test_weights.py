"""REOR against the paper's formula, and the weightings it is asked about."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn.functional import cross_entropy

from diagnostics.scenes import (
    ROWS,
    by_optimizer,
    close,
    gain_of,
    loop_gradients,
    really_stepped,
    scene,
    undisturbed,
)
from primum.diagnostics import Probe, first_order, measure, reor, weightings
from primum.kernel.recipe import RADIUS, Primum
from primum.paper import Paper, PaperSettings

NAMES = ["head", "paper", "network", "permuted", "uniform"]


def J(rows, displacement):
    """The paper's objective, Eq. 2: interference of a displacement of all parameters."""
    return (rows @ displacement).clamp_min(0).sum()


@by_optimizer
def test_reor_literally(kind):
    """`(J(D_b) - J(D*)) / J(D_b)`: D_b a real step, D* = D_b - lr D_kappa G' w (Eq. 13)."""
    probe = scene("cnn", kind)
    found, rows = measure(probe), loop_gradients(probe)
    g = torch.cat([rows[n].flatten(1) for n in probe.moved], 1)
    gains = [gain_of(probe.optimizer, p, rows[n].sum(0)) for n, (p, _) in probe.moved.items()]
    gain, lr = torch.cat([k.flatten() for k in gains]), found.lr
    _, moved = really_stepped(probe, torch.ones(ROWS))
    base = torch.cat([moved[n].flatten() for n in probe.moved])
    for weights in weightings(probe, found).values():
        better = base - lr * gain * (g.t() @ weights)
        expected = (J(g, base) - J(g, better)) / J(g, base)
        linear = reor(found.drift.sum(0), found.drift_after(weights))
        assert float(linear) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


@by_optimizer
def test_reor_under_the_true_step_literally(kind):
    """The same with D* the displacement of a copy that really steps on the weighted loss."""
    probe = scene("cnn", kind)
    given = weightings(probe, measure(probe))
    found, rows = first_order(probe, given), loop_gradients(probe)
    g = torch.cat([rows[n].flatten(1) for n in probe.moved], 1)

    def displacement(weights):
        _, moved = really_stepped(probe, weights)
        return torch.cat([moved[n].flatten() for n in probe.moved])

    plain = J(g, displacement(torch.ones(ROWS).double()))
    for key, weights in given.items():
        expected = (plain - J(g, displacement(1 + weights))) / plain
        exact = reor(found["plain"].drift, found[key].drift)
        assert float(exact) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


def test_reor_by_hand():
    before = torch.tensor([3.0, -5.0, 1.0, 0.0])
    after = torch.tensor([[1.0, 1.0, -2.0, 0.0], [0.0, -1.0, -1.0, -1.0], [8.0, 0.0, 0.0, 0.0]])
    assert reor(before, after).tolist() == [0.5, 1.0, -1.0]
    assert reor(before, before) == 0
    assert reor(-before.abs(), before).isnan()
    assert reor(-before.abs(), -before.abs()).isnan()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.sampled_from([1e-6, 1.0, 1e6]))
def test_reor_has_no_units(values, scale):
    before = torch.tensor([*values, 1.0]).double()
    after = before.flip(0) - 0.5
    assert float(reor(before, after)) <= 1
    close(reor(scale * before, scale * after), reor(before, after), 1e-6)


@by_optimizer
def test_what_is_asked(kind):
    probe = scene("cnn", kind)
    found = measure(probe)
    given = weightings(probe, found)
    assert list(given) == NAMES
    for weights in given.values():
        assert weights.shape == (ROWS,)
        assert (weights >= 0).all()
        assert (weights <= 2 + 1e-9).all()
    head = given["head"]
    assert head.max() > 0
    assert torch.equal(given["permuted"].sort().values, head.sort().values)
    assert not torch.equal(given["permuted"], head)
    close(given["uniform"], head.mean().expand(ROWS))


@by_optimizer
def test_the_networks_problem_is_solved_for_the_network(kind):
    """No other weighting, made feasible, has a smaller value of the network's problem."""
    probe = scene("cnn", kind)
    found = measure(probe)
    given = weightings(probe, found, radius=0.3)
    problem = found.problem(radius=0.3)

    def objective(weights):
        moved = problem.gram.times(weights)
        length = (weights @ moved).sqrt()
        shrunk = min(1.0, float(problem.trust_radius / length)) if length > 0 else 1.0
        harm = (problem.drift - shrunk * moved).clamp_min(0).sum()
        return float(harm + (shrunk * length) ** 2 / (2 * problem.max_extra_weight))

    best = objective(given["network"])
    for name in NAMES:
        assert best <= objective(given[name]) * (1 + 1e-4)


def test_settings():
    probe = scene("cnn")
    found = measure(probe)
    for weights in weightings(probe, found, radius=0).values():
        assert not weights.any()
    small = weightings(probe, found, max_extra_weight=0.01)
    for name in ("head", "paper", "network"):
        assert 0 < small[name].max() <= 0.01 + 1e-9


def test_more_recipes_are_asked_and_not_disturbed():
    probe = scene("cnn")
    mine = Paper(PaperSettings(radius=RADIUS["sample"]))
    kept = copy.deepcopy(mine.state_dict())
    more = {"mine": mine, "tight": Primum(radius=0.05)}
    given = weightings(probe, measure(probe), recipes=more)
    assert list(given) == [*NAMES, "mine", "tight"]
    close(given["mine"], given["paper"])
    assert 0 < given["tight"].sum() < given["head"].sum()
    assert mine.state_dict() == kept


def test_seed_shuffles():
    probe = scene("cnn", "SGD")
    found = measure(probe)
    other = scene("cnn", "SGD", seed=1)
    one, two = weightings(probe, found)["permuted"], weightings(other, found)["permuted"]
    assert torch.equal(one, weightings(probe, found)["permuted"])
    assert not torch.equal(one, two)


def test_nothing_is_disturbed():
    probe = scene("cnn", "AdamW")
    found = measure(probe)
    with undisturbed(probe):
        weightings(probe, found)


@pytest.mark.parametrize("inputs", [torch.zeros(1, 3), torch.zeros(4, 3), torch.ones(4, 3) * 1e6])
def test_ugly_batches(inputs):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    labels = torch.zeros(len(inputs)).long()
    probe = Probe(model, optimizer, cross_entropy, inputs, labels)
    for weights in weightings(probe, measure(probe)).values():
        assert weights.isfinite().all()
