"""2 - What the optimizer is about to do to the head: its step and its gain.

Group and state are read at every call, never cached and never modified. A class with a rule
(`rules.py`) is predicted exactly; any other is dry-run on a copy (`dryrun.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.compat import same_step
from primum.dryrun import dry_run, probe_of
from primum.rules import RULES, Rule, Scalar, Seen, columns, scalar, sgd

LEAST_SHARE = 1e-12  # Of the larger lr: a gain of 0 would divide by 0.


@dataclass(frozen=True)
class Update:
    """What the optimizer is about to do to one parameter, per unit learning rate.

    With `maximize=True` the optimizer descends along minus the gradient: `step` is still the true
    displacement (uphill), and `gain`, taken with respect to minus the gradient, is still positive.

    Attributes:
        step: `(new_param - param) / lr`, signed, in the shape of the parameter.
        gain: `-d(step)/d(gradient)`, elementwise, the second-moment denominators held at their
            predicted values. A float or a 0-dim tensor where equal for all entries.
        lr: the learning rate of the parameter's group, as found there.
    """

    step: Tensor
    gain: Tensor | float
    lr: Tensor | float

    def size(self, metric: str) -> Tensor:
        """Length of the step: in the optimizer's own metric ("gain"), or "euclidean"."""
        plain = metric == "euclidean" or (isinstance(self.gain, float) and self.gain == 1.0)
        size: Tensor = (self.step if plain else self.step / self.gain**0.5).norm()
        return size


def predict(optimizer: Optimizer, param: Tensor, grad: Tensor, rows: slice | None = None) -> Update:
    """The update that `optimizer.step()` would make to `param` if its gradient were `grad`.

    Exact for the classes in `RULES` and for subclasses that keep their `step`; any other class is
    dry-run. Group and state are read at every call; what is patched onto the instance's `step`
    (by LR schedulers) is not looked at.

    Args:
        optimizer: holds `param`; left as it is.
        param: the parameter; may be half precision.
        grad: the gradient the optimizer would see, float32 or float64; the result has its dtype.
        rows: those of the parameter that `grad` is for, if not all; where `sliceable`.
    """
    group, state = group_of(optimizer, param), optimizer.state.get(param, {})
    seen = Seen(optimizer, group, _part(state, param, rows), _some(param, rows), grad)
    return _apply(_rule_for(type(optimizer)), seen)


def predict_head(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    grad: Tensor,
    *,
    factor: Scalar | None = None,
    rows: slice | None = None,
) -> Update:
    """The update of a linear head, weight and bias side by side, per unit of the larger lr.

    Args:
        head: the layer.
        owners: maps "weight", and "bias" if that is trained, to their optimizers.
        grad: the gradient of the step, as far as it is known. [d_out, d_in + 1], without the last
            column if there is no bias; so is the step.
        factor: the optimizer will see this times `grad`; the gain is with respect to `grad`.
        rows: the outputs that `grad` is for, if not all; where `sliceable`.
    """
    if factor is not None:
        update = predict_head(head, owners, grad * factor, rows=rows)
        return replace(update, gain=update.gain * factor)
    weight, bias, optimizer = head.weight, head.bias, owners["weight"]
    if "bias" not in owners:
        return predict(optimizer, weight, grad, rows)
    group, rule = group_of(optimizer, weight), _rule_for(type(optimizer))
    of_weight, of_bias = optimizer.state.get(weight, {}), optimizer.state.get(bias, {})
    if (
        rule is not dry_run
        and any(held is bias for held in group["params"])
        and of_weight.keys() == of_bias.keys()
        and _same_count(of_weight.get("step", 0.0), of_bias.get("step", 0.0))
    ):
        beside = _some(bias, rows), _part(of_bias, bias, rows)
        own, of_own = _some(weight, rows), _part(of_weight, weight, rows)
        return _apply(rule, Seen(optimizer, group, of_own, own, grad, beside))
    parts = (
        predict(optimizer, weight, grad.narrow(1, 0, grad.shape[1] - 1), rows),
        predict(owners["bias"], bias, grad.select(1, -1), rows),
    )
    fractions = shares(parts[0].lr, parts[1].lr)
    pairs = list(zip(parts, fractions, strict=True))
    return Update(
        columns(*(part.step * share for part, share in pairs)),
        _gains([part.gain * share for part, share in pairs], grad),
        # The larger lr: one of these fractions is 1, the other may stand in for 0.
        (parts[0].lr + parts[1].lr) / (fractions[0] + fractions[1]),
    )


def _gains(gains: list[Scalar], like: Tensor) -> Scalar:
    """The gain of weight and bias: one number if equal, [1, d] if numbers, else [d_out, d]."""
    of_weight, of_bias = gains
    if not any(isinstance(gain, Tensor) for gain in gains) and of_weight == of_bias:
        return of_weight
    if all(not isinstance(gain, Tensor) or gain.dim() == 0 for gain in gains):
        row = like.new_ones(1, like.shape[1])
        return torch.cat((row[:, :-1] * of_weight, row[:, -1:] * of_bias), 1)
    one = torch.ones_like(like)
    return columns(one[:, :-1] * of_weight, one[:, -1] * of_bias)


def sliceable(owners: Mapping[str, Optimizer]) -> bool:
    """Whether some rows of a head can be predicted without the others."""
    return all(_rule_for(type(optimizer)) is not dry_run for optimizer in owners.values())


def uniform(owners: Mapping[str, Optimizer]) -> bool:
    """Whether the gain is the same for all outputs, judged by the classes alone."""
    return all(_rule_for(type(optimizer)) in (sgd, dry_run) for optimizer in owners.values())


def _part(state: Mapping[str, Any], param: Tensor, rows: slice | None) -> Mapping[str, Any]:
    """The state of some rows of a parameter: what has its shape is sliced."""
    if rows is None:
        return state
    shape = param.shape
    return {
        key: _some(value, rows) if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in state.items()
    }


def _some(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor.narrow(0, rows.start, rows.stop - rows.start)


def _apply(rule: Rule, seen: Seen) -> Update:
    with torch.no_grad():
        step, gain = rule(seen)
    return Update(step.to(seen.grad.dtype), gain, seen.lr())


def accumulated(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    dtype: torch.dtype,
    scale: Tensor | None = None,
    rows: slice | None = None,
) -> Tensor | None:
    """What is in `.grad` already, times `scale`, in that type; None if nothing is.

    -> [d_out, d_in + 1], without the last column if there is no bias.
    """
    parts = [getattr(head, part).grad for part in owners]
    if all(part is None for part in parts):
        return None
    own = [
        torch.zeros_like(getattr(head, part)) if grad is None else grad
        for part, grad in zip(owners, parts, strict=True)
    ]
    own = [_some(grad, rows).to(dtype) for grad in own]
    total = columns(*own) if len(own) == 2 else own[0]
    return total if scale is None else total * scale


def has_gradients(head: nn.Linear | None, owners: Mapping[str, Optimizer]) -> bool:
    """Whether anything has accumulated in `.grad` of the head."""
    return head is not None and any(getattr(head, part).grad is not None for part in owners)


def _same_count(one: Scalar, other: Scalar) -> bool:
    """Whether two step counts are known, without waiting for a device, to be equal."""
    one, other = scalar(one), scalar(other)
    return isinstance(one, float) and isinstance(other, float) and one == other


def shares(*rates: Scalar) -> list[Scalar]:
    """Learning rates as fractions of the largest, never quite 0; all 1 if all are 0."""
    if any(isinstance(rate, Tensor) for rate in rates):
        device = next(rate.device for rate in rates if isinstance(rate, Tensor))
        dtype = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([torch.as_tensor(r, dtype=dtype, device=device) for r in rates])
        fractions = torch.where(stacked.max() > 0, stacked / stacked.max(), 1.0)
        return list(fractions.clamp_min(LEAST_SHARE).unbind())
    largest = max(float(rate) for rate in rates)
    return [max(float(rate) / largest, LEAST_SHARE) if largest > 0 else 1.0 for rate in rates]


def group_of(optimizer: Optimizer, param: Tensor, name: str = "this parameter") -> dict[str, Any]:
    """The parameter group that holds `param` itself, as it is now."""
    for group in optimizer.param_groups:
        if any(held is param for held in group["params"]):
            return group
    raise ValueError(f"the optimizer does not hold {name}; pass the optimizer that trains it")


def check_supported(optimizer: Optimizer, param: Tensor, name: str = "this parameter") -> None:
    """Raise, in words a user can act on, where `predict` could not work."""
    kind, group = type(optimizer), group_of(optimizer, param, name)
    rule = _rule_for(kind)
    if param.layout != torch.strided or not param.is_floating_point():
        raise TypeError(f"{name} must be dense and real, got {param.dtype}, {param.layout}")
    if issubclass(kind, torch.optim.SparseAdam):
        raise TypeError("SparseAdam is not supported: it takes sparse gradients only; use Adam")
    needed = [p for p in inspect.signature(kind.step).parameters.values() if p.default is p.empty]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed[1:]):
        raise TypeError(
            f"{kind.__name__} is not supported: its step needs a closure that evaluates the model "
            "again (as LBFGS does), so it cannot be predicted; use SGD or AdamW"
        )
    if rule is sgd and group["momentum"] != 0 and group["dampening"] >= 1:
        raise ValueError(f"dampening must be < 1, got {group['dampening']}")
    if rule is dry_run:  # What cannot be copied shall fail here and not in a step.
        probe_of(Seen(optimizer, group, {}, param, param), param.detach(), 1.0)


def _rule_for(kind: type[Optimizer]) -> Rule:
    """The rule of a known class, or of a subclass that steps as its parent does; else a dry run."""
    known: Any = kind  # a metaclass of torch's stubs says that classes cannot be hashed
    return _rule_of(known, kind.step)


@cache
def _rule_of(kind: Any, step: Any) -> Rule:
    for known, rule in RULES.items():
        if issubclass(kind, known) and same_step(kind, known):
            return rule
    return dry_run
