"""Blocks in which gradients are plain, and what `torch.autograd.grad` gets outside of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from loops import batch, gradients, make, make_like, report_of, stir, train


def taken(model: nn.Module) -> list[Tensor]:
    """Gradients for the parameters, as Fisher estimates and meta-learning take them."""
    inputs, labels = batch(77, 24)
    loss = F.cross_entropy(model(inputs), labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_autograd_grad_inside_is_plain_bit_for_bit() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2)
    stir(optimizer)
    twin, _ = make_like(model, optimizer)
    with reducer.paused():
        inside = taken(model)
    assert all(torch.equal(a, b) for a, b in zip(inside, taken(twin), strict=True))
    outside = taken(model)
    assert not any(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert report_of(reducer).extra_weights.max() > 0.01


def test_training_after_it_is_as_if_nothing_had_been() -> None:
    model, optimizer = make()
    twin, stepper = make_like(model, optimizer)
    reducer, other = primum.attach(model, optimizer), primum.attach(twin, stepper)
    for number in range(3):
        train(model, optimizer, 1, number)
        train(twin, stepper, 1, number)
        with reducer.paused():
            taken(model)
        assert all(map(torch.equal, gradients(model), gradients(twin)))
    assert report_of(reducer).fallbacks == report_of(other).fallbacks == 0
    assert report_of(reducer).discarded == 0


def test_nested() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    with reducer.paused():
        with reducer.paused():
            assert not reducer.enabled
        assert not reducer.enabled
    assert reducer.enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_puts_back_what_was_set_before_also_after_an_error(enabled: bool) -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    reducer.enabled = enabled
    with pytest.raises(KeyError), reducer.paused():
        raise KeyError
    assert reducer.enabled is enabled
    with reducer.paused():
        pass
    assert reducer.enabled is enabled


def test_what_counts_is_the_backward_pass() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    with reducer.paused():
        loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    assert report_of(reducer).applied
