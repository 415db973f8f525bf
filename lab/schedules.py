"""Schedules of the learning rate, as a factor for each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

ScheduleName = Literal["cosine", "linear", "step", "constant"]
MILESTONES = (1 / 2, 3 / 4)  # He et al. (2016): a tenth at one half and three quarters


def make_schedule(
    name: ScheduleName, optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0
) -> LambdaLR:
    """A scheduler to be stepped after every optimizer step.

    The warm-up starts above 0, so that the first step is not wasted.

    Args:
        name: `cosine`: half a cosine down to `floor`. `linear`: a line down to `floor`; with a
            warm-up, a triangle. `step`: divided by ten at one half and at three quarters.
            `constant`: no decay.
        optimizer: Its learning rate is the peak.
        steps: Length of the run.
        warmup: Steps of linear warm-up, fewer than `steps`.
        floor: Final value of cosine and linear, as a share of the peak.
    """
    milestones = sorted({max(1, int(share * steps)) for share in MILESTONES})

    def done(step: int) -> float:
        return min(1.0, (step - warmup) / (steps - warmup))

    def cosine(step: int) -> float:
        return floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * done(step)))

    def linear(step: int) -> float:
        return floor + (1 - floor) * (1 - done(step))

    shapes: dict[str, Callable[[int], float]] = {
        "cosine": cosine,
        "linear": linear,
        "step": lambda step: 0.1 ** bisect_right(milestones, step),
        "constant": lambda step: 1.0,
    }
    shape = shapes[name]

    def factor(step: int) -> float:
        if step >= warmup:
            return shape(step)
        rising = (step + 1) / (warmup + 1)
        return rising if name in ("cosine", "linear") else rising * shape(step)

    return LambdaLR(optimizer, factor)


def scaled_lr(lr: float, batch_size: int, *, base_batch_size: int = 128) -> float:
    """The learning rate for another batch size, by square-root scaling (paper, App. E)."""
    return lr * math.sqrt(batch_size / base_batch_size)
