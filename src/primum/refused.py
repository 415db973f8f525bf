"""What shards optimizer states or parameters in ways that no step can be predicted for: by name.

FSDP1, ZeroRedundancyOptimizer and DeepSpeed are known by the names of their classes: importing them
to compare would take long, and they may not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.compat import fsdp_modules

INSTEAD = "use fully_shard (FSDP2), or DistributedDataParallel with a plain optimizer"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
ENGINE = "deepspeed.runtime."
SPLIT = "its optimizer updates flattened copies of the parameters"
STAGE_0 = (
    "ZeRO stage 0 in float32 works, attached after deepspeed.initialize: "
    'attach(engine, optimizer, scope="global")'
)


def check_model(model: nn.Module) -> None:
    """Refuse wrappers that split the head in ways that primum cannot follow."""
    for module in model.modules():
        if FSDP1 in _names(module):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) is not supported: it trains flattened pieces of "
                f"parameters, not the head's weight; {INSTEAD}"
            )
        if any(each.startswith(ENGINE) for each in _names(module)):
            stage, half = _asked(module, "zero_optimization_stage"), "its 16-bit optimizer"
            is_half = _asked(module, "bfloat16_enabled") or _asked(module, "fp16_enabled")
            if stage or is_half:
                which = f"ZeRO stage {stage}" if stage else half
                raise ValueError(f"DeepSpeed with {which} is not supported: {SPLIT}; {INSTEAD}")


def check_weight(weight: Any, name: str) -> None:
    """Refuse a parameter that DeepSpeed has split."""
    if hasattr(weight, "ds_id"):
        raise ValueError(
            f"{name}.weight is partitioned by DeepSpeed's ZeRO stage 3 (deepspeed.zero.Init), "
            f"which is not supported: {SPLIT}; {INSTEAD}"
        )


def check_optimizer(given: Any) -> None:
    """Refuse DeepSpeed's optimizers, which are not torch's."""
    names = list(_names(given))
    if any(each.startswith(ENGINE) for each in names) and not isinstance(given, nn.Module):
        raise TypeError(
            f"DeepSpeed's {type(given).__name__} (ZeRO 1, 2, 3 and its 16-bit optimizers) is not "
            f"supported: {SPLIT}; {INSTEAD}. {STAGE_0}"
        )


def is_zero(optimizer: object) -> bool:
    """Whether each rank steps only some of the parameters that an optimizer lists."""
    return ZERO in _names(optimizer)


def check_owner(optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer that steps the head on one rank alone."""
    if is_zero(optimizer):
        raise TypeError(
            f"ZeroRedundancyOptimizer is not supported for {name}: only one rank holds its state "
            f"and can predict its step; {INSTEAD}, or give the head a plain optimizer of its own "
            "and pass that to attach"
        )


def made_late(*, split: bool) -> str:
    """What may have replaced the parameters that an optimizer held, for a message."""
    if split:
        return "; create it after fully_shard"
    if "deepspeed" in sys.modules:
        return f". DeepSpeed's ZeRO and 16-bit optimizers are not supported: {SPLIT}; {INSTEAD}"
    return ""


def why_lost(model: nn.Module | None, weight: Tensor, owner: Optimizer) -> str:
    """Why the optimizer's step of the head cannot be predicted any more; "" if it can."""
    if any(held is weight for group in owner.param_groups for held in group["params"]):
        return ""
    gone = "the optimizer no longer holds the head's weight"
    if model is not None and any(True for _ in fsdp_modules(model)):
        return f"{gone}: fully_shard was called after attach; attach after fully_shard"
    if hasattr(weight, "ds_id") or "deepspeed" in sys.modules:
        return f"{gone}: DeepSpeed (ZeRO, 16-bit) is not supported, as {SPLIT}; {INSTEAD}"
    return f"{gone}; call .remove() and attach again with the one that trains it"


def _names(thing: object) -> Iterator[str]:
    """Full names of its class and of those above."""
    return (f"{each.__module__}.{each.__qualname__}" for each in type(thing).__mro__)


def _asked(thing: Any, name: str) -> Any:
    value = getattr(thing, name, None)
    return value() if callable(value) else value
