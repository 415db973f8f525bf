"""Losses that use the head's weight and never call the head: what is known when attaching.

A head that is not called has no output whose gradient could be reweighted. What cannot be seen here
(`F.linear_cross_entropy` in a model's own code) the `Monitor` notices after two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

PACKAGES = ("trl", "liger_kernel")  # Replace the `forward` of a language model by one of their own.

INSTEAD = "call the head and compute the loss from its output"

_looked_after: ContextVar[bool] = ContextVar("looked_after", default=False)


@contextmanager
def looked_after() -> Iterator[None]:
    """A block in which `attach` says nothing about bypassed heads, as the caller knows more."""
    token = _looked_after.set(True)
    try:
        yield
    finally:
        _looked_after.reset(token)


def bypassed(model: nn.Module, head: nn.Linear, name: str) -> str:
    """Why the head will not be called, and what to do about it; "" if nothing speaks for it."""
    if _looked_after.get():
        return ""
    known: Any = getattr(nn, "LinearCrossEntropyLoss", None)  # torch 2.13
    for path, module in model.named_modules():
        if known is not None and isinstance(module, known) and module.linear is head:
            return (
                f"nn.LinearCrossEntropyLoss ({path or 'the model'!r}) never calls its layer "
                f"{name!r}, so no sample weights are applied: replace it with an nn.Linear, "
                f"{INSTEAD}"
            )
    package = fusing_package(model)
    if package == "liger_kernel":
        return (
            "Liger replaced the model's forward: if labels are passed, it computes the loss from "
            f"the weight of {name!r} without calling that layer, so no sample weights are applied. "
            "Apply Liger with fused_linear_cross_entropy=False (in Transformers: "
            'liger_kernel_config={"fused_linear_cross_entropy": False}), or ' + INSTEAD
        )
    if package == "trl":
        return (
            "TRL replaced the model's forward: its trainers compute the loss from the weight of "
            f"{name!r} without calling that layer (unless compute_loss is overridden), so no "
            "sample weights are applied. Override compute_loss with that of transformers.Trainer, "
            f"or {INSTEAD}"
        )
    return ""


def fusing_package(model: nn.Module) -> str:
    """The package that replaced the `forward` of a language model by one of its own, or ""."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            for function in _layers(module.forward):
                package = package_of(function)
                if package in PACKAGES:
                    return package
    return ""


def package_of(function: Any) -> str:
    """The package of a function's code: `functools.wraps` changes its `__module__`."""
    code = getattr(function, "__func__", function)
    name: str = getattr(code, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, as far as `functools.wraps` tells."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
