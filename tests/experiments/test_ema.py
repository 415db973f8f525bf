"""The average of the weights, against the formula, and after a restart."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from primum.experiments.ema import weight_average


def walk(model: nn.Module, step: int) -> None:
    """Put a known value into every parameter, and run batch norm once in training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    model(torch.full((4, 2), float(step)) + torch.eye(4, 2))


def test_formula_for_parameters_and_running_statistics() -> None:
    model = nn.BatchNorm1d(2)
    average = weight_average(model, decay=0.75)
    weight, mean = torch.empty(0), torch.empty(0)
    for step in range(1, 5):
        walk(model, step)
        average.update_parameters(model)
        assert model.running_mean is not None
        if step == 1:
            weight, mean = model.weight.detach().clone(), model.running_mean.clone()
        weight = 0.75 * weight + 0.25 * model.weight.detach()
        mean = 0.75 * mean + 0.25 * model.running_mean
    torch.testing.assert_close(average.module.weight, weight)
    torch.testing.assert_close(average.module.running_mean, mean)
    assert model.weight[0] == 4.0  # the model itself is left alone


def test_going_on_from_a_file_is_bit_for_bit() -> None:
    model = nn.BatchNorm1d(2)
    whole, first = weight_average(model, 0.9), weight_average(model, 0.9)
    for step in range(1, 4):
        walk(model, step)
        whole.update_parameters(model)
        first.update_parameters(model)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    second = weight_average(nn.BatchNorm1d(2), 0.9)
    second.load_state_dict(state)
    walk(model, 4)
    whole.update_parameters(model)
    second.update_parameters(model)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_impossible_decay(decay: float) -> None:
    with pytest.raises(ValueError, match=f"got {decay}"):
        weight_average(nn.Linear(1, 1), decay)
