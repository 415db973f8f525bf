"""Losses before and after, against deep copies of model and optimizer that really step."""

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

import primum
from diagnostics.scenes import (
    ROWS,
    by_model,
    by_optimizer,
    close,
    loop_losses,
    really_stepped,
    scene,
    undisturbed,
)
from primum.diagnostics import Probe, RealStep, first_order, real_steps, reor
from primum.diagnostics.gradients import sample_losses
from primum.diagnostics.real import stepped

WEIGHTS = torch.linspace(0, 2, ROWS).double()


@by_model
@by_optimizer
def test_against_a_copy_that_really_steps(name, kind):
    probe = scene(name, kind)
    found = real_steps(probe, {"some": WEIGHTS})
    assert list(found) == ["plain", "some"]
    for key, weights in {"plain": torch.ones(ROWS), "some": 1 + WEIGHTS}.items():
        model, _ = really_stepped(probe, weights)
        close(found[key].before, loop_losses(probe.model, probe))
        close(found[key].after, loop_losses(model, probe))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
        lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
        lambda p: optim.Adagrad(p, lr=0.05),
        lambda p: optim.SGD(p, lr=0.1, foreach=True, momentum=0.9),
        lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    ],
    ids=["amsgrad", "RMSprop", "Adagrad", "foreach", "fused"],
)
def test_other_optimizers(make):
    probe = scene("mlp")
    optimizer = make(probe.model.parameters())
    probe = Probe(probe.model, optimizer, cross_entropy, probe.inputs, probe.targets)
    found = real_steps(probe, {"some": WEIGHTS})["some"]
    model, _ = really_stepped(probe, 1 + WEIGHTS)
    close(found.after, loop_losses(model, probe))


class Signs(optim.Optimizer):
    """A class of one's own, with an attribute that its step needs."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.factor = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= self.factor * group["lr"] * param.grad.sign()


def test_an_optimizer_of_ones_own():
    probe = scene("mlp")
    optimizer = Signs(probe.model.parameters(), lr=0.01)
    probe = Probe(probe.model, optimizer, cross_entropy, probe.inputs, probe.targets)
    new = stepped(probe, first_order(probe, {})["plain"].gradients)
    total = cross_entropy(probe.model(probe.inputs), probe.targets)
    gradients = torch.autograd.grad(total, list(probe.trained.values()))
    for (name, param), gradient in zip(probe.trained.items(), gradients, strict=True):
        close(new[name], param.detach() - 0.005 * gradient.sign())


def test_first_order_is_the_limit_of_small_steps():
    errors = []
    for lr in (1e-2, 1e-3, 1e-4):
        probe = scene("mlp", "SGD")
        probe.optimizer.param_groups[0]["lr"] = lr
        plain = real_steps(probe, {})["plain"]
        errors.append(float((plain.change - plain.predicted).norm() / plain.change.norm()))
    # The error of first order is of second order: ten times smaller steps, ten times less.
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.05)
    assert plain.sign_right == 1
    assert plain.correlation > 0.999999


def test_figures_by_hand():
    step = RealStep(
        before=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        after=torch.tensor([1.5, 1.0, 3.25, 4.0]),
        predicted=torch.tensor([1.0, -2.0, -0.5, 0.0]),
    )
    assert step.change.tolist() == [0.5, -1.0, 0.25, 0.0]
    assert step.harmed == 0.5
    assert step.sign_right == 0.75  # wrong about the third; no change is no harm
    expected = torch.corrcoef(torch.stack((step.change, step.predicted)))[0, 1]
    assert float(step.correlation) == pytest.approx(float(expected))
    mirrored = RealStep(step.before, step.after, -step.change)
    assert float(mirrored.correlation) == pytest.approx(-1)


def test_real_harm_removed_is_reor_of_real_changes():
    probe = scene("cnn", "momentum")
    found = real_steps(probe, {"some": WEIGHTS})
    model, _ = really_stepped(probe, torch.ones(ROWS))
    other, _ = really_stepped(probe, 1 + WEIGHTS)
    before = loop_losses(probe.model, probe)
    harm, left = ((loop_losses(m, probe) - before).clamp_min(0).sum() for m in (model, other))
    removed = reor(found["plain"].change, found["some"].change)
    assert float(removed) == pytest.approx(float((harm - left) / harm), rel=1e-6)


def test_the_same_masks_before_and_after():
    """With lr = 0 nothing moves, so nothing may change: not if masks were drawn anew."""
    model = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    inputs, labels = torch.randn(9, 20), torch.zeros(9).long()
    probe = Probe(model, optimizer, cross_entropy, inputs, labels, chunk_size=4)
    assert not real_steps(probe, {})["plain"].change.any()
    optimizer.param_groups[0]["lr"] = 1e-2
    plain = real_steps(probe, {})["plain"]
    assert plain.change.any()
    assert plain.correlation > 0.99  # of first order at the very same masks


def test_maximizing():
    probe = scene("mlp")
    up = optim.SGD(probe.model.parameters(), lr=1e-3, maximize=True)
    raised = Probe(probe.model, up, cross_entropy, probe.inputs, probe.targets)
    plain = real_steps(raised, {})["plain"]
    assert plain.change.sum() < 0  # minus the objective falls
    assert plain.correlation > 0.999


@by_optimizer
def test_nothing_is_disturbed(kind):
    probe = scene("cnn", kind)
    calls = []
    reducer = primum.attach(probe.model, probe.optimizer)
    probe.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    with undisturbed(probe):
        real_steps(probe, {"some": WEIGHTS})
    assert reducer.last is None
    assert not calls


def test_parameters_elsewhere_in_the_optimizer():
    """Of another model, and one that no optimizer holds: neither stops the step."""
    probe, other = scene("mlp"), nn.Linear(500, 2)
    held = [p for n, p in probe.model.named_parameters() if n != "1.bias"]
    optimizer = optim.SGD([*held, *other.parameters()], lr=0.1, momentum=0.9)
    mixed = Probe(probe.model, optimizer, cross_entropy, probe.inputs, probe.targets)
    new = stepped(mixed, first_order(mixed, {})["plain"].gradients)
    assert sorted(new) == sorted(n for n, _ in probe.model.named_parameters() if n != "1.bias")
    assert not torch.equal(sample_losses(mixed, new), sample_losses(mixed))
