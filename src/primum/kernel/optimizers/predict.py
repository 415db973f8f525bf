"""What an optimizer is about to do to a parameter: its step and its gain.

Group and state are read at every call, never cached and never modified. A class with a rule
(`rules.py`) is predicted exactly; any other is dry-run on a copy (`dry_run.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from primum.kernel.optimizers.dry_run import dry_run, probe_of, unhooked
from primum.kernel.optimizers.rules import RULES, OptimizerView, Rule, columns, sgd
from primum.kernel.scalars import Scalar, is_one, scalar

LEAST_SHARE = 1e-12  # Of the larger lr: a gain of 0 would divide by 0.


@dataclass(frozen=True)
class Update:
    """What an optimizer is about to do to a parameter, per unit learning rate.

    With `maximize=True` the optimizer descends along minus the gradient: `step` is still the true
    displacement (uphill), and `gain`, taken with respect to minus the gradient, is still positive.

    Attributes:
        step: `(new_param - param) / lr`, signed, in the shape of the parameter.
        gain: `-d(step)/d(gradient)`, elementwise, the second-moment denominators held at their
            predicted values. A float or a 0-dim tensor where equal for all entries.
        lr: the learning rate of the parameter's group, as found there.
    """

    step: Tensor
    gain: Scalar
    lr: Scalar

    def norm(self, metric: str) -> Tensor:
        """Length of the step: in the optimizer's own metric ("gain"), or "euclidean"."""
        plain = metric == "euclidean" or is_one(self.gain)
        norm: Tensor = (self.step if plain else self.step / self.gain**0.5).norm()
        return norm


@dataclass(frozen=True)
class Part:
    """A parameter with the optimizer that holds it, and its group there."""

    param: Tensor
    optimizer: Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.optimizer.state.get(self.param, {})
        return state

    @property
    def rule(self) -> Rule:
        return rule_for(type(self.optimizer))

    def view(self, grad: Tensor, rows: slice | None, beside: Part | None = None) -> OptimizerView:
        """What a rule reads; of some rows of the parameter, if not of all."""
        other = None if beside is None else (narrow(beside.param, rows), beside._state(rows))
        own = narrow(self.param, rows)
        return OptimizerView(self.optimizer, self.group, self._state(rows), own, grad, other)

    def _state(self, rows: slice | None) -> Mapping[str, Any]:
        if rows is None:
            return self.state
        shape = self.param.shape
        return {
            key: narrow(value, rows)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for key, value in self.state.items()
        }


def predict(optimizer: Optimizer, param: Tensor, grad: Tensor, rows: slice | None = None) -> Update:
    """The update that `optimizer.step()` would make to `param` if its gradient were `grad`.

    Exact for the classes in `RULES` and for subclasses that keep their `step`; any other class is
    dry-run. What is patched onto the instance's `step` (by LR schedulers) is not looked at.

    Args:
        optimizer: holds `param`; left as it is.
        param: the parameter; may be half precision.
        grad: the gradient the optimizer would see, float32 or float64; the result has its dtype.
        rows: those of the parameter that `grad` is for, if not all; only for classes with a rule.
    """
    return predict_part(Part(param, optimizer, group_of(optimizer, param)), grad, rows)


def predict_part(
    part: Part, grad: Tensor, rows: slice | None, beside: Part | None = None
) -> Update:
    view = part.view(grad, rows, beside)
    with torch.no_grad():
        step, gain = part.rule(view)
    return Update(step.to(grad.dtype), gain, view.lr())


def predict_parts(parts: Mapping[str, Part], grad: Tensor, rows: slice | None = None) -> Update:
    """The update of a linear layer, "weight" and "bias" side by side, per unit of the larger lr.

    Shapes: grad [d_out, d_in + 1], without the last column if no bias is trained; so is the step.
    """
    weight, bias = parts["weight"], parts.get("bias")
    if bias is None:
        return predict_part(weight, grad, rows)
    if _together(weight, bias):
        return predict_part(weight, grad, rows, bias)
    updates = (
        predict_part(weight, grad.narrow(1, 0, grad.shape[1] - 1), rows),
        predict_part(bias, grad.select(1, -1), rows),
    )
    fractions = shares(updates[0].lr, updates[1].lr)
    pairs = list(zip(updates, fractions, strict=True))
    return Update(
        columns(*(update.step * share for update, share in pairs)),
        _gains([update.gain * share for update, share in pairs], grad),
        # The larger lr: one of these fractions is 1, the other may stand in for 0.
        (updates[0].lr + updates[1].lr) / (fractions[0] + fractions[1]),
    )


def _together(weight: Part, bias: Part) -> bool:
    """Whether one formula gives both: one group, states of the same kind and age."""
    if weight.group is not bias.group or weight.rule is dry_run:
        return False
    of_weight, of_bias = weight.state, bias.state
    ages = scalar(of_weight.get("step", 0.0)), scalar(of_bias.get("step", 0.0))
    known = all(isinstance(age, float) for age in ages)  # without waiting for a device
    return of_weight.keys() == of_bias.keys() and known and bool(ages[0] == ages[1])


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


def narrow(tensor: Tensor, rows: slice | None) -> Tensor:
    """Some rows of a tensor, all if None."""
    return tensor if rows is None else tensor.narrow(0, rows.start, rows.stop - rows.start)


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
    rule = rule_for(kind)
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
        probe_of(OptimizerView(optimizer, group, {}, param, param), param.detach(), 1.0)


def rule_for(kind: type[Optimizer]) -> Rule:
    """The rule of a known class, or of a subclass that steps as its parent does; else a dry run."""
    known: Any = kind  # a metaclass of torch's stubs says that classes cannot be hashed
    return _rule_of(known, kind.step)


@cache
def _rule_of(kind: Any, step: Any) -> Rule:
    for known, rule in RULES.items():
        if issubclass(kind, known) and all(
            unhooked(getattr(kind, name, None)) is unhooked(getattr(known, name, None))
            for name in ("step", "_init_group")
        ):
            return rule
    return dry_run
