"""The dry run: what an optimizer without a formula does, seen on a throw-away copy."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.kernel.optimizers.rules import OptimizerView
from primum.kernel.scalars import Scalar, where

PROBE_LR = 1e-3  # For lr = 0: near the limit, yet well above float32 rounding.
LEAST_COSINE = 1e-3  # The gain never takes step and gradient to be closer to orthogonal.


def dry_run(view: OptimizerView) -> tuple[Tensor, Scalar]:
    """Step throw-away copies with `grad` and with zero; the gain is the multiple of `grad` between.

    That fit is exact for an optimizer linear in the present gradient, and still says something for
    one that takes signs or divides by a norm, where a small change along `grad` changes nothing.
    Where it is not positive, the whole step is fitted instead. It is an approximation: one number
    for all entries, the parameter seen alone. Half precision is stepped in the dtype of `grad`;
    `lr = 0` is replaced by `PROBE_LR`. Waits for the device only where the class's own step does.
    """
    lr = where(view.lr() == 0, PROBE_LR, view.lr())

    def displacement(grad: Tensor) -> Tensor:
        probe, clone = probe_of(view, grad, lr)
        devices = [view.param.device] if view.param.is_cuda else []
        with torch.random.fork_rng(devices=devices):  # the class may draw random numbers
            type(probe).step(probe)
        vars(probe).clear()  # An attribute may refer to the probe: leave no cycle behind.
        return (clone.detach() - view.param) / lr

    step, push = displacement(view.grad), view.grad if view.group.get("maximize") else -view.grad
    size, length = (push * push).sum(), (step * step).sum()
    response = ((step - displacement(torch.zeros_like(push))) * push).sum() / size
    whole = torch.maximum((step * push).sum() / size, LEAST_COSINE * (length / size).sqrt())
    gain = torch.ones_like(size)
    for fit in (whole, response):
        gain = torch.where((fit > 0) & fit.isfinite(), fit, gain)
    return step, gain


def probe_of(view: OptimizerView, grad: Tensor, lr: Scalar) -> tuple[Optimizer, Tensor]:
    """A throw-away optimizer that holds a copy of the parameter alone, and that copy.

    Made without the constructor, whose signature is unknown: the attributes of the instance are
    copied, except hooks and patches of `step`. Other parameters become one empty stand-in, and a
    model among the attributes is shared, not copied.
    """
    optimizer, param, held = view.optimizer, view.param, vars(view.optimizer)
    name = type(optimizer).__name__
    wraps = any(isinstance(x, Optimizer) and x is not optimizer for x in held.values())
    if wraps or not {"param_groups", "state"} <= held.keys():
        raise TypeError(f"{name} wraps another optimizer; pass the one it wraps")

    def copied(tensor: Tensor) -> Tensor:
        dtype = grad.dtype if tensor.dtype == param.dtype else tensor.dtype
        return tensor.detach().to(dtype, copy=True)

    clone = copied(param)
    if isinstance(param, torch.nn.Parameter):
        clone = torch.nn.Parameter(clone, param.requires_grad)
    vars(clone).update(vars(param))  # Some optimizers read marks set on the parameter.
    clone.grad = grad.clone()

    kind: Any = type(optimizer)
    probe: Optimizer = object.__new__(_without_hooks(kind))
    parts = {k: OrderedDict() if k.endswith("_hooks") else v for k, v in held.items()}
    parts.pop("step", None)
    state = {k: v for k, v in optimizer.state.items() if k is param or not isinstance(k, Tensor)}
    parts["state"] = defaultdict(dict, state)
    own_rate = view.group.get("lr") is None
    parts["param_groups"] = [{**view.group, "params": [param]} | ({} if own_rate else {"lr": lr})]
    nothing = torch.empty(0)
    memo: dict[int, Any] = {id(p): nothing for g in optimizer.param_groups for p in g["params"]}
    memo |= {
        id(x): copied(x) for x in _leaves(list(state.values()), set()) if isinstance(x, Tensor)
    }
    memo |= {id(x): x for x in _leaves(list(parts.values()), set()) if isinstance(x, nn.Module)}
    try:
        vars(probe).update(copy.deepcopy(parts, memo | {id(optimizer): probe, id(param): clone}))
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be copied for a dry run: {error}") from error
    return probe, clone


@cache
def _without_hooks(kind: Any) -> Any:
    """A subclass whose steps, its parents' among them, run no step hooks: not a user's either.

    Of each class above `kind` that has a step of its own a subclass without the wrapper is put
    right before it in the order of method resolution, where `super().step()` finds it first.
    """
    above = [
        type(each.__name__, (each,), {"step": unhooked(vars(each)["step"])})
        for each in kind.__mro__[1:]
        if "step" in vars(each) and each is not Optimizer
    ]
    return type(kind.__name__, (kind, *above), {"step": unhooked(kind.step)})


def _leaves(tree: Any, seen: set[int]) -> Iterator[Any]:
    """What is in nested lists, tuples, dicts and the attributes of objects, each once."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    yield tree
    if isinstance(tree, Mapping):
        below = list(tree.values())
    elif isinstance(tree, list | tuple):
        below = list(tree)
    elif isinstance(tree, Tensor | nn.Module | Optimizer | type | ModuleType):
        return
    else:
        below = list(getattr(tree, "__dict__", {}).values())
    for each in below:
        yield from _leaves(each, seen)


def unhooked(function: Any) -> Any:
    """A `step` without the wrapper, put around it by torch, that runs hooks. Else as it is."""
    wrap = getattr(Optimizer, "profile_hook_step", None)
    if wrap is None:
        return function
    wrapper = wrap(Optimizer.step).__code__
    while getattr(function, "__code__", None) is wrapper:
        function = function.__wrapped__
    return function
