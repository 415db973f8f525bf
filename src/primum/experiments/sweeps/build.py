"""Optimizer, learning-rate schedule and precision from a run's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from primum.experiments.schedules import constant, multi_step, warmup_cosine
from primum.experiments.sweeps.settings import RunSettings, SettingsError


def build_optimizer(settings: RunSettings, model: nn.Module) -> Optimizer:
    """SGD or AdamW at the full learning rate."""
    groups = _groups(settings, model)
    if settings.optimizer == "sgd":
        return SGD(
            groups,
            lr=settings.rate,
            momentum=settings.momentum,
            weight_decay=settings.decay,
            nesterov=settings.nesterov,
        )
    return AdamW(
        groups,
        lr=settings.rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.decay,
    )


def _groups(settings: RunSettings, model: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if settings.decay_norms:
        return [{"params": params}]
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def build_schedule(
    settings: RunSettings, optimizer: Optimizer, steps: int, steps_per_epoch: int
) -> LambdaLR:
    """A factor for each of `steps`."""
    warmup = round(settings.warmup * steps_per_epoch)
    if warmup >= steps:
        raise SettingsError(
            f"warmup takes {warmup} steps, but the run has {steps}; choose a shorter one"
        )
    if settings.schedule == "cosine":
        return warmup_cosine(optimizer, steps=steps, warmup=warmup, floor=settings.lr_floor)
    if settings.schedule == "step":
        milestones = sorted({max(1, steps // 2), max(1, 3 * steps // 4)})
        return multi_step(optimizer, milestones=milestones, warmup=warmup)
    if warmup:
        return multi_step(optimizer, milestones=[], warmup=warmup)
    return constant(optimizer)


def autocast(settings: RunSettings) -> AbstractContextManager[Any]:
    """Around forward passes."""
    if settings.precision == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float16
    return torch.autocast(torch.device(settings.device).type, dtype=dtype)


def build_scaler(settings: RunSettings) -> torch.amp.GradScaler | None:
    """For fp16, whose small gradients would vanish."""
    if settings.precision != "fp16":
        return None
    return torch.amp.GradScaler(torch.device(settings.device).type)


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from a generator seeded for the run; others' goes on untouched."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
