"""`reducer.check(loss_fn, batch)`: gradients and prediction against slow references."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

from .scene import Net, batch, net, sgd, train

Batch = tuple[Tensor, Tensor]


def losses_of(model: nn.Module, pair: Batch) -> Tensor:
    inputs, labels = pair
    return F.cross_entropy(model(inputs), labels, reduction="none")


def centred(model: nn.Module, pair: Batch) -> Tensor:
    """Each loss depends on all rows, which only the loss shows."""
    inputs, labels = pair
    logits = model(inputs)
    return F.cross_entropy(3 * (logits - logits.mean(0)), labels, reduction="none")


class Noisy(Net):
    """With what draws random numbers and what keeps buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    tensors = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return [*tensors, grads, modes, torch.get_rng_state()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_ordinary_model_passes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = sgd(model) if kind == "SGD" else optim.AdamW(model.parameters(), lr=0.01)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2)
    capsys.readouterr()
    result = reducer.check(losses_of, batch(5, 24))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line, word in zip(lines, ("head", "gradients", "prediction"), strict=True):
        assert word in line
    assert result.head == "head"
    assert isinstance(result.gradient_error, float)
    assert isinstance(result.prediction_error, float)
    assert result.gradient_error < 1e-4
    assert result.prediction_error < 1e-4
    assert result.ok is True


def test_a_loss_that_mixes_samples_fails(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    result = reducer.check(centred, batch(5, 24))
    assert result.gradient_error > 0.01
    assert result.ok is False


class Forgetful(optim.Optimizer):
    """Its step depends on a count outside of its state, which no copy of the state has."""

    count = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Forgetful.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1 * (-2.0) ** Forgetful.count)


def test_a_step_that_is_not_the_predicted_one_fails() -> None:
    model = net()
    optimizer = Forgetful(model.parameters())
    reducer = primum.attach(model, optimizer)
    result = reducer.check(losses_of, batch(5, 24))
    assert result.prediction_error > 0.1
    assert result.ok is False


@pytest.mark.parametrize("steps", [0, 2])
def test_everything_is_restored_bit_for_bit(steps: int) -> None:
    """Before the first step, where gradients and states are still missing, and later."""
    torch.manual_seed(0)
    model = Noisy().double()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, steps)
    before = state_of(model, optimizer)
    reducer.check(losses_of, batch(5, 24))
    assert same(state_of(model, optimizer), before)
