"""Optimizers that change, come in numbers, or are not torch's usual ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from compatibility.oracle import check_step, explicit
from loops import ADAMW, BOTH, SGD, batch, make, report_of, train


def losses_on(number: int) -> Callable[[nn.Module], Tensor]:
    inputs, labels = batch(number, 24)
    return lambda model: F.cross_entropy(model(inputs), labels, reduction="none") / 24


@BOTH
@pytest.mark.parametrize("schedule", ["OneCycleLR", "exponential", "warm-up from 0"])
def test_rates_that_change_in_every_step(schedule: str, kind: Any, options: Any) -> None:
    """OneCycleLR moves the momentum, or beta1, as well."""
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    made: dict[str, Callable[[], optim.lr_scheduler.LRScheduler]] = {
        "OneCycleLR": lambda: optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
        "exponential": lambda: optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "warm-up from 0": lambda: optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 4),
    }
    scheduler = made[schedule]()
    most = []
    for number in range(5):
        lr = optimizer.param_groups[0]["lr"]
        if lr == 0:  # nothing moves, but the optimizer remembers
            train(model, optimizer, 1, first=number)
            optimizer.zero_grad()
        else:
            most.append(check_step(model, [optimizer], reducer, losses_on(number), head="2", lr=lr))
        scheduler.step()
    assert max(most) > 0.01


@BOTH
@pytest.mark.parametrize("faster", ["weight", "bias"])
def test_weight_and_bias_in_groups_of_their_own(faster: str, kind: Any, options: Any) -> None:
    """No decay on biases, and another rate: units are those of the larger one."""
    model, _ = make()
    rates = {"weight": 0.02, "bias": 0.02} | {faster: 0.05}
    optimizer = kind(
        [
            {"params": model[0].parameters()},
            {"params": [model[2].weight], "lr": rates["weight"]},
            {"params": [model[2].bias], "lr": rates["bias"], "weight_decay": 0.0},
        ],
        **options,
    )
    reducer = primum.attach(model, optimizer)
    most = [
        check_step(model, [optimizer], reducer, losses_on(number), head="2", lr=0.05)
        for number in range(4)
    ]
    assert max(most) > 0.01


@BOTH
def test_backbone_joins_later(kind: Any, options: Any) -> None:
    """Linear probing first; then `add_param_group` for the rest."""
    model, _ = make()
    model[0].requires_grad_(False)
    optimizer = kind(model[2].parameters(), **options)
    reducer = primum.attach(model, optimizer)
    most = []
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        step = check_step(
            model, [optimizer], reducer, losses_on(number), head="2", lr=options["lr"]
        )
        most.append(step)
    assert min(most) > 0.01


@BOTH
def test_head_joins_another_group_later(kind: Any, options: Any) -> None:
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.03})
    most = [
        check_step(model, [optimizer], reducer, losses_on(number), head="2", lr=0.03)
        for number in range(2, 5)
    ]
    assert max(most) > 0.01


@BOTH
def test_state_loaded_after_attaching(kind: Any, options: Any) -> None:
    """Moments, counts and rates of another run, from then on."""
    other, source = make(kind, options | {"lr": 0.03}, seed=3)
    train(other, source, 5)
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    most = [
        check_step(model, [optimizer], reducer, losses_on(number), head="2", lr=0.03)
        for number in range(3)
    ]
    assert max(most) > 0.01


needs_muon = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.8 has no Muon")


@needs_muon
@pytest.mark.parametrize("order", [1, -1])
def test_muon_below_and_adamw_for_the_head(order: int) -> None:
    """Matrices of hidden layers to Muon; biases and the head to AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = model.double()
    matrices = [model[0].weight, model[2].weight]
    others = [model[0].bias, model[2].bias, *model[4].parameters()]
    optimizers = [optim.Muon(matrices, lr=0.02), optim.AdamW(others, **ADAMW)]
    reducer = primum.attach(model, optimizers[::order])
    most = [
        check_step(model, optimizers, reducer, losses_on(number), head="4", lr=ADAMW["lr"])
        for number in range(4)
    ]
    assert max(most) > 0.01


@needs_muon
@pytest.mark.parametrize(("radius", "least"), [(0.2, 0.3), (None, 0.1)])
def test_muon_for_the_head_itself(radius: float | None, least: float) -> None:
    """No formula, so a dry run: the step is exact, the gain one number for all entries.

    A rough prediction is good for small changes: a smaller radius removes more.
    """
    model, _ = make(bias=False)
    optimizers = [optim.SGD(model[0].parameters(), **SGD), optim.Muon([model[2].weight], lr=0.02)]
    reducer = primum.attach(model, optimizers, radius=radius)
    removed = 0.0
    for number in range(6):
        losses_of = losses_on(number)
        plain = explicit(model, optimizers, "2", losses_of, lr=0.02)
        before = copy.deepcopy(model)
        check_step(model, optimizers, reducer, losses_of, head="2", lr=0.02)
        step = (model[2].weight - before[2].weight).detach().flatten() / 0.02
        harm = (plain.gradients @ step).clamp_min(0).sum()
        removed += float((plain.harm - harm) / plain.harm) / 6
    assert removed > least
    assert report_of(reducer).extra_weights.max() > 0.01


def test_steps_within_the_backward_pass() -> None:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    (model, _), (twin, plain) = make(), make()
    optimizers = {p: optim.SGD([p], **SGD) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    reducers = primum.attach(model, optimizers.values()), primum.attach(twin, plain)
    for number in range(4):
        inputs, labels = batch(number, 24)
        F.cross_entropy(model(inputs), labels).backward()
        plain.zero_grad()
        F.cross_entropy(twin(inputs), labels).backward()
        plain.step()
        found, expected = (report_of(each).extra_weights for each in reducers)
        assert expected.max() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


def test_two_passes_for_one_step() -> None:
    """Sharpness-aware training: the second pass, at moved weights, is the one that counts."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    for number in range(4):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for param, move in zip(model.parameters(), moves, strict=True):
                param.add_(move)
        optimizer.zero_grad()
        twin = copy.deepcopy(model)
        F.cross_entropy(model(inputs), labels).backward()
        w = report_of(reducer).extra_weights
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves, strict=True):
                param.sub_(move)
        optimizer.step()
    assert w.max() > 0.01
    assert report_of(reducer).fallbacks == 0
