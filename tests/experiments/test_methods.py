"""Radii, and who is attached."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import primum
from experiments.conftest import TINY, tiny
from primum import diagnostics
from primum.experiments.arms import ARMS, Arm
from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError
from primum.experiments.methods import Method, make_method

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


NO_REPORT = ("network", "upgrad-network", "mgda", "damped")
CHAIN = tuple(name for name in ARMS if name != "explicit")


def taking_steps(name: str) -> tuple[Method, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    name = "mgda@groups=3" if name == "mgda" else name  # of six samples
    method = make_method(tiny(name), model, optimizer)
    batch = Batch(torch.randn(6, 4), LABELS, torch.arange(6))
    for step in range(3):
        optimizer.zero_grad()
        method.backward(batch, step, 3, observed=method.observed(0))
        optimizer.step()
    return method, model


@pytest.mark.parametrize("name", CHAIN)
def test_each_arm_takes_a_step(name: str) -> None:
    method, model = taking_steps(name)
    without = name in ("base", "lr-matched", "time-matched", "focal", *NO_REPORT)
    assert method.weighs == (not without)
    if name not in NO_REPORT:
        assert method.last is not None
        assert method.last.applied == method.weighs
        assert int(method.last.fallbacks) == 0
    plain = taking_steps("base")[1]
    same = all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert same == (name in ("base", "lr-matched", "time-matched"))


def gradients(name: str) -> tuple[list[torch.Tensor], Method]:
    """Of the next step: weight and bias of the first layer, then of the head."""
    method, model = taking_steps("base")  # the same start for all
    method.remove()
    method = make_method(tiny(name), model, method.optimizer)
    method.optimizer.zero_grad()
    torch.manual_seed(1)
    batch = Batch(torch.randn(6, 4), LABELS, torch.arange(6))
    method.backward(batch, 0, 3, observed=True)
    return [param.grad for param in model.parameters() if param.grad is not None], method


@pytest.mark.parametrize(("part", "own"), [("head", {2, 3}), ("backbone", {0, 1})])
def test_weights_on_one_part_of_the_network(part: str, own: set[int]) -> None:
    plain, both = gradients("base")[0], gradients("primum@radius=0.4")[0]
    found, method = gradients(f"primum@radius=0.4,part={part}")
    assert method.last is not None
    assert method.last.applied
    for place in range(4):
        assert not torch.allclose(plain[place], both[place])
        expected = both[place] if place in own else plain[place]
        torch.testing.assert_close(found[place], expected)
    # What the optimizer gets is not what the reducer handed on: it must not be taken for clipping.
    method.optimizer.step()
    assert method.reducer is not None
    assert method.reducer.state_dict()["factor"] is None


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_explicit_gradients_with_zero_weights_are_the_plain_step(blocks: int) -> None:
    (_, plain), (method, explicit) = taking_steps("base"), taking_steps(f"explicit@blocks={blocks}")
    assert method.last is None
    assert not method.observed(0)
    for own, other in zip(explicit.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_explicit_needs_a_chain() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="--model resnet20-chain"):
        make_method(tiny("explicit"), model, optimizer)


def test_the_networks_weights_are_those_of_the_whole_problem() -> None:
    method, model = taking_steps("network")
    batch = Batch(torch.randn(6, 4), LABELS, torch.arange(6))
    problem = diagnostics.measure(
        diagnostics.Probe(model, method.optimizer, nn.CrossEntropyLoss(), *batch[:2])
    ).problem(radius=method.arm.radius)
    method.backward(batch, 3, 4, observed=False)
    expected = primum.solve(problem, 50).extra_weights
    torch.testing.assert_close(method.weights.double(), expected.double(), rtol=1e-3, atol=1e-4)


def test_an_arm_without_weights_is_observed_now_and_then() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = make_method(TINY, model, optimizer)
    assert [method.observed(place) for place in (0, 1, 10)] == [True, False, True]
    method.backward(Batch(LOGITS, LABELS, torch.arange(6)), 1, 3, observed=False)
    assert method.last is None


def test_the_radius_reaches_the_recipe() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = tiny("primum@radius=0.4,radius_schedule=fade-linear")
    method = make_method(settings, model, optimizer)
    method.backward(Batch(LOGITS, LABELS, torch.arange(6)), 1, 5, observed=True)
    assert method.recipe is not None
    assert method.recipe.radius == pytest.approx(0.3)


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_damping_removes_a_share_of_the_mean_gradient_at_the_logits(damping: float) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Batch(LOGITS, LABELS, torch.arange(6))
    method = make_method(tiny(f"damped@damping={damping}"), model, optimizer)
    method.backward(batch, 0, 3, observed=False)
    logits = model(batch.inputs).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(nn.functional.cross_entropy(logits, LABELS), logits)
    expected = gradients - damping * gradients.mean(0)
    torch.testing.assert_close(model.bias.grad, expected.sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.weight.grad, expected.T @ batch.inputs)
    with pytest.raises(UserError, match="damping must be > 0 and at most 1, got 2"):
        Arm.parse("damped@damping=2")
