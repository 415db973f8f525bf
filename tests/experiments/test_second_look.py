"""A second look at a batch: what is solved the second time, and that nothing else changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from experiments.conftest import tiny
from primum.experiments.arms import Arm
from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError
from primum.experiments.methods import make_method
from primum.experiments.second_look import SecondLook

LOOKS = ("head", "network")
OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=0.02),
}


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *(layers or (nn.Tanh(),)), nn.Linear(8, 4))


def batches(count: int, seed: int = 1) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 12, 4, generator=draws)
    labels = torch.randint(4, (count, 12), generator=draws)
    return [Batch(x, y, torch.arange(12)) for x, y in zip(inputs, labels, strict=True)]


def look_after_training(
    look: str, model: nn.Module, optimizer: optim.Optimizer
) -> tuple[SecondLook, Batch]:
    """Two plain steps, then the backward pass of a third one with a second look."""
    *earlier, batch = batches(3)
    for each in earlier:
        optimizer.zero_grad()
        F.cross_entropy(model(each.inputs), each.targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    method = make_method(tiny(f"primum@radius=0.4,second_look={look}"), model, optimizer)
    assert isinstance(method, SecondLook)
    method.backward(batch, 0, 3, observed=True)
    return method, batch


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_drift_is_that_of_the_samples_at_the_moved_backbone(look: str, optimizer: str) -> None:
    model = network()
    method, batch = look_after_training(look, model, OPTIMIZERS[optimizer](model))
    assert method.last is not None
    # The reference: a copy that really steps with the first weights.
    twin, stepper = copy.deepcopy((model, method.optimizer))
    stepper.zero_grad()
    losses = F.cross_entropy(twin(batch.inputs), batch.targets, reduction="none")
    ((1 + method.first_weights) * losses).mean().backward()
    stepper.step()
    before = dict(model.named_parameters())
    moved = {
        name: before[name] if name.startswith("2.") else param.detach()
        for name, param in twin.named_parameters()
    }
    step = {name: param - before[name] for name, param in twin.named_parameters()}
    lr = stepper.param_groups[0]["lr"]

    def loss(params: dict[str, Tensor], i: int) -> Tensor:
        output = torch.func.functional_call(model, params, (batch.inputs[i : i + 1],))
        return F.cross_entropy(output, batch.targets[i : i + 1])

    def along(params: dict[str, Tensor], i: int) -> Tensor:
        slopes = torch.func.grad(loss)(params, i)
        return sum((slopes[name] * step[name]).sum() for name in ("2.weight", "2.bias"))

    change = torch.stack([along(moved, i) - along(before, i) for i in range(12)])
    if look == "network":
        change += torch.stack([loss(moved, i) - loss(before, i) for i in range(12)])
    model.zero_grad()
    reducer = primum.observe(model, method.optimizer)  # replaces the arm's
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    assert reducer.last is not None
    expected = reducer.last.drift + change.detach() / (12 * lr)
    assert not torch.allclose(expected, reducer.last.drift, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(method.last.drift, expected, rtol=1e-3, atol=1e-5)  # float32


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_a_backbone_that_stays_the_first_weights_are_applied(
    look: str, optimizer: str
) -> None:
    model = network()
    for param in model[0].parameters():
        param.requires_grad_(False)
    method, batch = look_after_training(look, model, OPTIMIZERS[optimizer](model))
    assert method.first_weights.max() > 0.01
    torch.testing.assert_close(method.weights, method.first_weights, rtol=1e-4, atol=1e-5)
    found = gradients_of(model)
    model.zero_grad()
    once = make_method(tiny("primum@radius=0.4"), model, method.optimizer)
    once.backward(batch, 0, 3, observed=True)
    for own, other in zip(found, gradients_of(model), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("look", LOOKS)
def test_the_second_weights_go_into_all_gradients(look: str) -> None:
    model = network()
    method, batch = look_after_training(look, model, OPTIMIZERS["sgd"](model))
    assert not torch.allclose(method.weights, method.first_weights, atol=0.01)
    found = gradients_of(model)
    model.zero_grad()
    method.remove()
    losses = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
    ((1 + method.weights) * losses).mean().backward()
    for own, other in zip(found, gradients_of(model), strict=True):
        torch.testing.assert_close(own, other)
    assert method.last is not None
    assert method.last.extra_weights is method.weights


def test_two_samples_by_hand() -> None:
    """One input of 1 each; the backbone moves, and with it how hard the head pulls on each.

    Features are a = 1 for both, logits h a. With h = (0, 0) all softmax outputs are 1/2, the labels
    are opposite, and the head's gradients cancel. Momentum pushes the head by u = (1, -1) and the
    backbone by 1 per unit of lr 0.1: sample 0 gains and sample 1 is harmed. At the moved backbone
    a' = 1.1 and the old head the outputs are still 1/2, so all that changes is the feature: the
    head's momentum moves the logits by 1.1 times as much. Losses do not change by the backbone.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[1].weight)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=1.0)
    pushes = torch.tensor([[-1.0]]), torch.tensor([[-1.0], [1.0]])  # momentum; steps go against it
    for param, push in zip(model.parameters(), pushes, strict=True):
        optimizer.state[param]["momentum_buffer"] = push
    batch = Batch(torch.ones(2, 1), torch.tensor([0, 1]), torch.arange(2))
    found = {}
    for look in LOOKS:
        settings = tiny(f"primum@radius=0.4,second_look={look},max_extra_weight=1000")
        method = make_method(settings, model, optimizer)
        assert isinstance(method, SecondLook)
        optimizer.zero_grad()
        method.backward(batch, 0, 3, observed=True)
        found[look] = method
        # gradients of L_i / 2: (-1/4, 1/4) and (1/4, -1/4), so the drift is (-1/2, 1/2). Weight on
        # sample 1 pulls along its gradient, whose squared norm is 1/8; the region has the radius
        # 0.4 sqrt(2), which is w sqrt(1/8) with w = 1.6. It spares the sample 1.6 / 8 = 0.2.
        torch.testing.assert_close(method.first_weights, torch.tensor([0.0, 1.6]))
        assert method.last is not None
        # The trial step's effect on sample 1 is 0.5 - 0.2 = 0.3 at the old features; at the new
        # ones it is a tenth larger.
        torch.testing.assert_close(method.last.drift, torch.tensor([-0.53, 0.53]))
        torch.testing.assert_close(method.weights, torch.tensor([0.0, 1.6]))  # still at the edge
    assert math.isclose(float(found["head"].last.drift_after[1]), 0.33, rel_tol=1e-4)


@pytest.mark.parametrize("look", LOOKS)
def test_statistics_random_numbers_and_state_move_once(look: str) -> None:
    """Batch norm, dropout and momentum end as after one plain forward pass."""
    layers = nn.BatchNorm1d(8), nn.Dropout(0.5)
    model, plain = network(*layers), copy.deepcopy(network(*layers))
    optimizer, other = (OPTIMIZERS["sgd"](each) for each in (model, plain))
    (batch,) = batches(1)
    method = make_method(tiny(f"primum@second_look={look}"), model, optimizer)
    numbers = []
    for backward in (
        lambda: method.backward(batch, 0, 3, observed=True),
        lambda: F.cross_entropy(plain(batch.inputs), batch.targets).backward(),
    ):
        torch.manual_seed(5)
        backward()
        numbers.append(torch.rand(3))
    torch.testing.assert_close(*numbers, rtol=0, atol=0)
    expected = plain.state_dict()
    for name, own in model.state_dict().items():
        assert torch.equal(own, expected[name]), name
    assert optimizer.state_dict()["state"] == other.state_dict()["state"] == {}
    assert method.last is not None
    assert int(method.last.discarded) == 0


def test_steps_after_the_last_radius_are_plain() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model)
    method = make_method(tiny("primum@until=0.5,second_look=head"), model, optimizer)
    (batch,) = batches(1)
    method.backward(batch, 2, 3, observed=True)
    found = gradients_of(model)
    model.zero_grad()
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    for own, other in zip(found, gradients_of(model), strict=True):
        torch.testing.assert_close(own, other)


def test_what_does_not_work_is_refused() -> None:
    with pytest.raises(UserError, match="part=head and second_look=head cannot be combined"):
        Arm.parse("primum@part=head,second_look=head")
    with pytest.raises(UserError, match="second_look=head is for images; leave it out"):
        Arm.parse("primum@second_look=head", task="language")
    model = network()
    settings = tiny("primum@second_look=head", clip=1.0)
    with pytest.raises(UserError, match="does not work with clipping; leave out --clip"):
        make_method(settings, model, OPTIMIZERS["sgd"](model))
