"""Warnings point at the line of the user's file that runs into them, not into torch or primum."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import SGD, batch, make


def caught(action: Callable[[], object], match: str) -> warnings.WarningMessage:
    """The one warning of `action` that matches."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    matching = [each for each in found if match in str(each.message)]
    assert len(matching) == 1, [str(each.message) for each in found]
    return matching[0]


def assert_points_at(warning: warnings.WarningMessage, action: Callable[[], object]) -> None:
    """The file is this one, and the line is one of the action's own."""
    assert warning.filename == __file__
    lines, first = inspect.getsourcelines(action)
    assert first <= warning.lineno < first + len(lines)


def test_a_step_that_stays_plain() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    optimizer.param_groups.clear()
    inputs, labels = batch(0, 24)

    def backward() -> None:
        F.cross_entropy(model(inputs), labels).backward()

    assert_points_at(caught(backward, "no longer holds"), backward)


def test_values_that_are_not_finite() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)

    def backward() -> None:
        F.cross_entropy(model(inputs * float("nan")), labels).backward()

    assert_points_at(caught(backward, "not finite"), backward)


def test_an_error_of_ours() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer, recipe=Failing())
    inputs, labels = batch(0, 24)

    def backward() -> None:
        F.cross_entropy(model(inputs), labels).backward()

    assert_points_at(caught(backward, "no luck today"), backward)


class Failing(primum.Primum):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no luck today")


def test_the_explicit_form() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, recipe=Failing())
    inputs, labels = batch(0, 24)
    losses = F.cross_entropy(model(inputs), labels, reduction="none")

    def call() -> None:
        reducer(losses)

    assert_points_at(caught(call, "no luck today"), call)


def test_a_discarded_pass() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    F.cross_entropy(model(inputs), labels).backward()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()

    assert_points_at(caught(step, "paused"), step)


def test_two_calls_in_one_pass() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)

    def backward() -> None:
        (F.cross_entropy(model(inputs), labels) + model(-inputs).square().mean()).backward()

    assert_points_at(caught(backward, "ran more than once"), backward)


class Fused(nn.Module):
    """Uses its head's weight without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.head.weight, self.head.bias)


@pytest.mark.parametrize("how", ["fused", "replaced"])
def test_a_head_that_is_bypassed(how: str) -> None:
    """Noticed in a step of the optimizer: there it points."""
    model: nn.Module = Fused().double() if how == "fused" else make()[0]
    optimizer = optim.SGD(model.parameters(), **SGD)
    primum.attach(model, optimizer)
    if how == "replaced":
        model[2] = nn.Linear(8, 4).double()
        optimizer.add_param_group({"params": list(model[2].parameters())})

    def training() -> None:
        for number in range(5):
            inputs, labels = batch(number, 24)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    assert_points_at(caught(training, "primum"), training)


def test_an_optimizer_that_was_rebuilt() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    rebuilt = optim.SGD(model.parameters(), **SGD)

    def training() -> None:
        for number in range(5):
            inputs, labels = batch(number, 24)
            rebuilt.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            rebuilt.step()

    assert_points_at(caught(training, "rebuilt"), training)


def test_a_compiled_model() -> None:
    """Its gradients arrive in a graph; the line is still that of the backward pass."""
    torch.compiler.reset()
    model, optimizer = make()
    primum.attach(model, optimizer, recipe=Failing())
    compiled = torch.compile(model, backend="aot_eager")
    inputs, labels = batch(0, 24)

    def backward() -> None:
        F.cross_entropy(compiled(inputs), labels).backward()

    assert_points_at(caught(backward, "no luck today"), backward)
