"""An exponential moving average of the weights, which some recipes evaluate instead of the last."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def weight_average(model: nn.Module, decay: float = 0.9999) -> AveragedModel:
    """A copy of the model; `update_parameters(model)` after each step moves it by `1 - decay`.

    The first update copies the weights. Running statistics of batch norm are averaged too.
    It is a module: call it on images, save its `state_dict()`, which also counts the updates, and
    load it into a new one to go on. Make it before `primum.attach`: it copies what is attached.

    Args:
        model: what is trained.
        decay: share of the average that stays at each step; 0.9999 in the ConvNeXt recipe.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay must be in [0, 1), got {decay}")
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=average, use_buffers=True)
