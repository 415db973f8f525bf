"""Moving and casting a model after a step, as for an export, also where torch swaps tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import primum

from .scene import net, sgd, train

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "float": lambda model: model.float(),
    "to": lambda model: model.to(dtype=torch.bfloat16),
}


@pytest.fixture
def swapped() -> Iterator[None]:
    """Parameters are swapped in place, as `fully_shard` has it and torch 3 will."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("removed", [False, True], ids=["attached", "removed"])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_model_can_be_converted_after_a_step(swapped: None, how: str, removed: bool) -> None:
    model = net()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2)
    if removed:
        reducer.remove()
    CONVERSIONS[how](model)
    assert len({p.dtype for p in model.parameters()}) == 1


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_plain_model_can_be_converted(swapped: None, how: str) -> None:
    """Guards the test above."""
    model = net()
    train(model, sgd(model), 2)
    CONVERSIONS[how](model)
