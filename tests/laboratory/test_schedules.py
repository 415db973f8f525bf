"""Learning rates step by step, and after a restart; the radius over training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lab.schedules import make_schedule, scaled_lr


def optimizer(lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


def rates(count: int, name: str, **options: float) -> list[float]:
    """The learning rate of each step."""
    sgd = optimizer()
    schedule = make_schedule(name, sgd, **options)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        found.append(float(sgd.param_groups[0]["lr"]))
        sgd.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["cosine", "linear", "step", "constant"])
def test_warmup_rises_in_equal_parts_to_the_full_rate(name: str) -> None:
    assert rates(5, name, steps=20, warmup=4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_line_from_full_to_the_floor_is_a_triangle_with_a_warmup() -> None:
    found = rates(12, "linear", steps=10, warmup=2, floor=0.2)
    assert found[:2] == pytest.approx([0.5 / 3, 1 / 3])
    assert found[2:11] == pytest.approx([0.5 - 0.05 * k for k in range(9)])
    assert found[11] == pytest.approx(0.1)


def test_cosine_from_full_through_half_to_the_floor() -> None:
    found = rates(13, "cosine", steps=10, warmup=2, floor=0.2)
    expected = [0.1 + 0.4 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert found[2:11] == pytest.approx(expected)
    assert found[10:] == pytest.approx([0.1] * 3)  # and no rise after the last step


@pytest.mark.parametrize(("name", "reference"), [
    ("step", lambda sgd: torch.optim.lr_scheduler.MultiStepLR(sgd, [4, 6])),
    ("cosine", lambda sgd: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 8)),
    ("constant", lambda sgd: torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)),
    ("linear", lambda sgd: torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, 8)),
])  # fmt: skip
def test_shapes_are_those_of_torch(name, reference) -> None:  # type: ignore[no-untyped-def]
    sgd = optimizer()
    other = reference(sgd)
    for rate in rates(8, name, steps=8):
        assert rate == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        other.step()


def test_continuing_from_a_state() -> None:
    whole = rates(9, "cosine", steps=10, warmup=3)
    first, second = optimizer(), optimizer()
    schedule, again = (make_schedule("cosine", o, steps=10, warmup=3) for o in (first, second))
    for _ in range(5):
        first.step()
        schedule.step()
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
