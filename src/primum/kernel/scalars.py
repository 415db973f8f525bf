"""Numbers that the host may have, or the device alone: nothing here waits for a device."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = Tensor | float  # A tensor only where the host does not have the number.


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float32, or float64 where that is given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_host(value: Tensor) -> bool:
    """Whether `value` can be read without waiting for a device (and has data: no FakeTensor)."""
    return type(value) is Tensor and value.device.type == "cpu"


def read(tensor: Tensor) -> float:
    """The number in a tensor of host memory: not a sync, and nothing is dispatched."""
    number: Any = tensor.tolist()
    while isinstance(number, list):  # a tensor of one entry
        (number,) = number
    return float(number)


def scalar(value: Scalar) -> Scalar:
    """A setting or a step count: a float where the host has it, else a 0-dim tensor.

    `tolist`, unlike `item`, dispatches nothing. On a device the arithmetic is in float64 (but for
    MPS, which has none): `1 - 0.999**t` begins with three good digits in float32.
    """
    if not isinstance(value, Tensor):
        return value
    if on_host(value):
        return read(value)
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def where(condition: Tensor | bool, yes: Scalar, no: Scalar) -> Scalar:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def is_one(value: Scalar) -> bool:
    """Whether the host knows that a factor is 1, so that there is nothing to multiply."""
    return isinstance(value, float | int) and value == 1


def at_least(value: Scalar, floor: float) -> Scalar:
    return value.clamp_min(floor) if isinstance(value, Tensor) else max(value, floor)


def at_most(value: Scalar, cap: float) -> Scalar:
    return value.clamp_max(cap) if isinstance(value, Tensor) else min(value, cap)
