"""Learning rates over training: warm-up and cosine, steps, and how they grow with the batch.

Each schedule is a factor on the optimizer's own learning rate, taken once per step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(
    optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0
) -> LambdaLR:
    """Linear warm-up to the full learning rate, then half a cosine down to `floor` of it.

    The warm-up starts above 0: a first step of length 0 would teach nothing.

    Args:
        optimizer: whose learning rate is the full one.
        steps: of the whole run.
        warmup: steps of warm-up, fewer than `steps`.
        floor: last value, as a share of the full learning rate.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be >= 0 and less than steps ({steps}), got {warmup}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must be between 0 and 1, got {floor}")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (steps - warmup))
        return floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def multi_step(
    optimizer: Optimizer, *, milestones: Sequence[int], gamma: float = 0.1, warmup: int = 0
) -> LambdaLR:
    """The full learning rate, multiplied by `gamma` at each milestone, after a linear warm-up.

    He et al. (2016) on CIFAR: milestones at one half and three quarters of 64,000 steps.
    """
    if list(milestones) != sorted(set(milestones)):
        raise ValueError(f"milestones must increase, got {list(milestones)}")
    if warmup < 0:
        raise ValueError(f"warmup must be >= 0, got {warmup}")

    def factor(step: int) -> float:
        rising = (step + 1) / (warmup + 1) if step < warmup else 1.0
        return rising * gamma ** bisect_right(milestones, step)

    return LambdaLR(optimizer, factor)


def constant(optimizer: Optimizer) -> LambdaLR:
    """The full learning rate throughout."""
    return LambdaLR(optimizer, lambda step: 1.0)


def scaled_lr(lr: float, batch_size: int, *, base_batch_size: int = 128) -> float:
    """A learning rate for another batch size: it grows with the square root (paper, App. E)."""
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(f"batch sizes must be >= 1, got {batch_size} and {base_batch_size}")
    return lr * math.sqrt(batch_size / base_batch_size)
