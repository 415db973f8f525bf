"""Optimizer and weight averaging, from the settings of a run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lab.settings import RunSettings


def make_optimizer(settings: RunSettings, model: nn.Module) -> Optimizer:
    """SGD or AdamW at the peak learning rate."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [{"params": params}]
    if not settings.decay_norms or settings.bias_lr != 1:
        own = {
            "lr": settings.rate * settings.bias_lr,
            "weight_decay": settings.decay / settings.bias_lr if settings.decay_norms else 0.0,
        }
        groups = [
            {"params": [param for param in params if param.dim() > 1]},
            {"params": [param for param in params if param.dim() <= 1], **own},
        ]
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


def weight_average(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of the weights; running statistics are averaged too."""
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=average, use_buffers=True)
