"""Losses fused with the head: they multiply by its weight, the head itself is never called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

PACKAGES = ("trl", "liger_kernel")


def fusing_package(model: nn.Module) -> str:
    """The package that replaced the `forward` of a language model by one of its own, or ""."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            for function in _layers(module.forward):
                package = _package(function)
                if package in PACKAGES:
                    return package
    return ""


def way_out(package: str, args: Any, trainer: Any = None) -> str:
    """What to do to have the head called, for a warning; "" if the settings do already.

    Args:
        package: As found by `fusing_package`.
        args: The Trainer's `TrainingArguments`, of TRL or Transformers.
        trainer: The Trainer, if it is known.
    """
    if package == "liger_kernel":
        return 'To keep the head, set liger_kernel_config={"fused_linear_cross_entropy": False}'
    own_loss = trainer is not None and (
        getattr(trainer, "compute_loss_func", None) is not None
        or _package(type(trainer).compute_loss) != "trl"
    )
    if own_loss or getattr(args, "label_smoothing_factor", 0) > 0:
        return ""
    if getattr(args, "loss_type", None) == "chunked_nll":
        return 'To keep the head, set loss_type="nll"'
    if type(args).__name__ == "SFTConfig":
        return (
            "To keep the head, override compute_loss by that of transformers.Trainer or pass "
            "compute_loss_func="
        )
    return "No setting of this trainer keeps the head"


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, as far as `functools.wraps` tells."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _package(function: Any) -> str:
    """The package of a function's code: `functools.wraps` changes its `__module__`."""
    code = getattr(function, "__func__", function)
    name: str = getattr(code, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]
