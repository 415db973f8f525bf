"""Optimizers, schedules and precision as the settings say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from experiments.sweeps.conftest import TINY
from primum.experiments.sweeps.build import (
    autocast,
    build_optimizer,
    build_scaler,
    build_schedule,
    own_random_numbers,
)
from primum.experiments.sweeps.settings import RunSettings, SettingsError


def rates(settings: RunSettings, steps: int, per_epoch: int) -> list[float]:
    optimizer = build_optimizer(settings, nn.Linear(2, 2))
    schedule = build_schedule(settings, optimizer, steps, per_epoch)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_sgd_and_adamw_have_their_settings() -> None:
    sgd = build_optimizer(replace(TINY, lr=0.3, momentum=0.5, nesterov=True), nn.Linear(2, 2))
    assert isinstance(sgd, SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.5, True)
    adamw = build_optimizer(
        replace(TINY, optimizer="adamw", beta2=0.95, eps=1e-6, weight_decay=0.1), nn.Linear(2, 2)
    )
    assert isinstance(adamw, AdamW)
    group = adamw.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-6, 0.1)


def test_biases_and_norms_may_go_without_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    groups = build_optimizer(replace(TINY, decay_norms=False), model).param_groups
    assert [[p.dim() for p in group["params"]] for group in groups] == [[2], [1, 1, 1]]
    assert [group["weight_decay"] for group in groups] == [TINY.decay, 0.0]


def test_schedules() -> None:
    point = replace(TINY, lr=1.0)
    assert rates(replace(point, schedule="constant"), 3, 1) == [1.0] * 3
    assert rates(replace(point, schedule="step"), 8, 1) == pytest.approx(
        [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    cosine = rates(point, 4, 1)
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447], rel=1e-5)
    floored = rates(replace(point, lr_floor=0.5), 4, 1)
    assert floored == pytest.approx([0.5 + 0.5 * each for each in cosine])


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_warm_up_in_epochs(schedule: str) -> None:
    point = replace(TINY, lr=1.0, warmup=1.5, schedule=schedule)  # type: ignore[arg-type]
    assert rates(point, 16, 2)[:3] == pytest.approx([0.25, 0.5, 0.75])


def test_a_warm_up_as_long_as_the_run() -> None:
    with pytest.raises(SettingsError, match="warmup takes 8 steps, but the run has 8"):
        rates(replace(TINY, warmup=2.0), 8, 4)


def test_precision() -> None:
    layer, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with autocast(replace(TINY, precision=precision)):  # type: ignore[arg-type]
            assert layer(inputs).dtype == dtype
    assert build_scaler(TINY) is None
    assert build_scaler(replace(TINY, precision="fp16")) is not None


def test_the_random_numbers_of_others_go_on_untouched() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with own_random_numbers(0, torch.device("cpu")):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with own_random_numbers(0, torch.device("cpu")):
        assert torch.equal(torch.rand(3), first)
