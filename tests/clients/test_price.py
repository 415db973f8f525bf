"""Where primum takes a large part of a step, it says so once, with the settings that would help.

Time is a number here that goes on where the tests say so: in the forward pass, and in the recipe.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from primum.kernel.recipe import Primum

STEPS = 100  # over which it is measured


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Body(nn.Module):
    """All of a step's work but primum's: takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        output: Tensor = self.layer(x)
        return output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What primum reads as the time."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def slow(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Let every solution take so long."""
    solve = Primum.__call__

    def solve_slowly(self: Primum, *args: Any, **kwargs: Any) -> Any:
        clock.now += seconds
        return solve(self, *args, **kwargs)

    monkeypatch.setattr(Primum, "__call__", solve_slowly)


def run(
    clock: Clock, steps: int, seconds: float, shape: tuple[int, int] = (8, 4), rows: int = 8
) -> list[str]:
    """Train; what was said about the price."""
    torch.manual_seed(0)
    width, outputs = shape
    model = nn.Sequential(Body(clock, seconds, width), nn.ReLU(), nn.Linear(width, outputs))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    primum.attach(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            inputs = torch.randn(rows, 4)
            optimizer.zero_grad()
            targets = torch.rand(rows, outputs)
            F.binary_cross_entropy_with_logits(model(inputs), targets).backward()
            optimizer.step()
    texts = [str(each.message) for each in caught]
    texts = [text for text in texts if "hardly any sample" not in text]  # its targets are noise
    assert all(issubclass(each.category, UserWarning | RuntimeWarning) for each in caught)
    assert all("max_iters" in text or "tolerance" in text for text in texts), texts
    return texts


def test_a_large_head_over_a_tiny_decoder(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoencoder's last layer, 400 x 784: seven times a plain step."""
    slow(monkeypatch, clock, 6.0)
    assert len(run(clock, STEPS + 2, 1.0, shape=(400, 784))) == 1


def test_a_small_head_over_a_large_network(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a ResNet: half a percent."""
    slow(monkeypatch, clock, 0.005)
    assert run(clock, 3 * STEPS, 1.0) == []


@pytest.mark.parametrize(("seconds", "said"), [(0.4, 1), (0.15, 0)])
def test_a_fifth_of_the_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, said: int
) -> None:
    """29% and 13% of the whole step."""
    slow(monkeypatch, clock, seconds)
    assert len(run(clock, STEPS + 2, 1.0)) == said


def test_not_before_a_hundred_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, clock, 6.0)
    assert run(clock, STEPS - 2, 1.0) == []


def test_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, clock, 6.0)
    assert len(run(clock, 4 * STEPS, 1.0)) == 1


def test_the_share_is_in_the_message(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that a user can check: 3 of 4 seconds."""
    slow(monkeypatch, clock, 3.0)
    (text,) = run(clock, STEPS + 2, 1.0)
    assert any(figure in text for figure in ("75", "0.7", "4.0", "3.0")), text


def test_data_that_come_slowly_are_part_of_the_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for its data does not become faster by a cheaper solver."""
    slow(monkeypatch, clock, 0.5)
    draw = torch.rand

    def draw_slowly(*args: Any, **kwargs: Any) -> Tensor:
        clock.now += 9.0
        return draw(*args, **kwargs)

    monkeypatch.setattr(torch, "rand", draw_slowly)
    assert run(clock, STEPS + 2, 1.0) == []
