"""Learning rates step by step, and after a restart."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from primum.experiments.schedules import constant, multi_step, scaled_lr, warmup_cosine

Make = Callable[[torch.optim.Optimizer], LambdaLR]


def optimizer(lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


def rates(make: Make, steps: int) -> list[float]:
    """The learning rate of each step."""
    sgd = optimizer()
    schedule = make(sgd)
    found = []
    for _ in range(steps):
        found.append(float(sgd.param_groups[0]["lr"]))
        sgd.step()
        schedule.step()
    return found


def test_warmup_rises_in_equal_parts_to_the_full_rate() -> None:
    found = rates(lambda sgd: warmup_cosine(sgd, steps=20, warmup=4), 5)
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_cosine_from_full_through_half_to_the_floor() -> None:
    found = rates(lambda sgd: warmup_cosine(sgd, steps=10, warmup=2, floor=0.2), 13)
    expected = [0.1 + 0.4 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert found[2:11] == pytest.approx(expected)
    assert found[6] == pytest.approx((0.5 + 0.1) / 2)  # half of the way down, at half time
    assert found[10:] == pytest.approx([0.1] * 3)  # and no rise after the last step


def test_steps_at_the_milestones() -> None:
    found = rates(lambda sgd: multi_step(sgd, milestones=[3, 5], gamma=0.1, warmup=1), 7)
    assert found == pytest.approx([0.25, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


def test_steps_as_torch_has_them() -> None:
    ours = rates(lambda sgd: multi_step(sgd, milestones=[2, 4]), 6)
    sgd = optimizer()
    reference = torch.optim.lr_scheduler.MultiStepLR(sgd, [2, 4])
    for rate in ours:
        assert rate == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        reference.step()


def test_constant() -> None:
    assert rates(constant, 3) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda sgd: warmup_cosine(sgd, steps=10, warmup=3),
        lambda sgd: multi_step(sgd, milestones=[4, 6]),
    ],
)
def test_going_on_from_a_state(make: Make) -> None:
    whole = rates(make, 9)
    first = optimizer()
    schedule = make(first)
    for _ in range(5):
        first.step()
        schedule.step()
    second = optimizer()
    again = make(second)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(schedule.state_dict())
    for rate in whole[5:]:
        assert second.param_groups[0]["lr"] == pytest.approx(rate)
        second.step()
        again.step()


def test_square_root_scaling() -> None:
    assert scaled_lr(0.1, 128) == pytest.approx(0.1)
    assert scaled_lr(0.1, 512) == pytest.approx(0.2)
    assert scaled_lr(1e-3, 1024) == pytest.approx(1e-3 * math.sqrt(8))
    assert scaled_lr(0.1, 64, base_batch_size=256) == pytest.approx(0.05)


def test_impossible_schedules() -> None:
    with pytest.raises(ValueError, match=r"less than steps \(5\), got 5"):
        warmup_cosine(optimizer(), steps=5, warmup=5)
    with pytest.raises(ValueError, match=r"got 1\.5"):
        warmup_cosine(optimizer(), steps=5, floor=1.5)
    with pytest.raises(ValueError, match=r"must increase, got \[5, 3\]"):
        multi_step(optimizer(), milestones=[5, 3])
    with pytest.raises(ValueError, match="got -1"):
        multi_step(optimizer(), milestones=[5], warmup=-1)
    with pytest.raises(ValueError, match="got 0 and 128"):
        scaled_lr(0.1, 0)
