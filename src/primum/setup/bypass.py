"""Losses that use the head's weight and never call the head: what is known when attaching.

A head that is not called has no output whose gradient could be reweighted. What cannot be seen here
(`F.linear_cross_entropy` in a model's own code) is noticed after two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

# Packages that replace the `forward` of a language model by one of their own.
PACKAGES = {
    "trl": "override the trainer's compute_loss so that it passes no labels",
    "liger_kernel": "apply Liger with fused_linear_cross_entropy=False (in Transformers: "
    'liger_kernel_config={"fused_linear_cross_entropy": False})',
}
INSTEAD = "call the head and compute the loss from its output, as loss = reducer(losses)"

_looked_after: ContextVar[bool] = ContextVar("looked_after", default=False)


@contextmanager
def looked_after() -> Iterator[None]:
    """A block in which `attach` says nothing about bypassed heads, as the caller knows more."""
    token = _looked_after.set(True)
    try:
        yield
    finally:
        _looked_after.reset(token)


def bypassed(model: nn.Module, layer: nn.Linear, name: str) -> str:
    """Why the head will not be called, and what to do about it; "" if nothing speaks for it."""
    if _looked_after.get():
        return ""
    known: Any = getattr(nn, "LinearCrossEntropyLoss", ())  # torch 2.13
    losses: list[Any] = [each for each in model.modules() if isinstance(each, known)]
    package = fusing_package(model)
    if any(each.linear is layer for each in losses):
        who = "nn.LinearCrossEntropyLoss computes"
        way = "replace it with an nn.Linear and nn.CrossEntropyLoss"
    elif package:
        who, way = f"{package} replaced the model's forward: it may compute", PACKAGES[package]
    else:
        return ""
    return (
        f"{who} the loss from the weight of {name!r} without calling that layer, so no sample "
        f"weights are applied; {way}, or {INSTEAD}"
    )


def fusing_package(model: nn.Module) -> str:
    """The package that replaced the `forward` of a language model by one of its own, or ""."""
    for module in model.modules():
        function: Any = module.forward if hasattr(module, "get_output_embeddings") else None
        while function is not None:  # and what it wraps, as far as `functools.wraps` tells
            if package_of(function) in PACKAGES:
                return package_of(function)
            function = getattr(function, "__wrapped__", None)
    return ""


def package_of(function: Any) -> str:
    """The package of a function's code: `functools.wraps` changes its `__module__`."""
    code = getattr(function, "__func__", function)
    name: str = getattr(code, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]
