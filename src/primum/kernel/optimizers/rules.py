"""The formulas: one rule per family of torch.optim, with the present gradient set apart.

    step = -gain * (descent + k * memory) - weight_decay * param

`descent` is the gradient that enters (minus it under `maximize`). Nothing is modified and nothing
waits for the device: a step count on the host is read there, one on the device stays a 0-dim
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from primum.kernel.scalars import Scalar, accum_dtype, scalar, where


@dataclass(frozen=True)
class OptimizerView:
    """What a rule sees: one parameter with its group, its state and its gradient."""

    optimizer: Optimizer
    group: dict[str, Any]
    state: Mapping[str, Any]
    own: Tensor
    grad: Tensor
    beside: tuple[Tensor, Mapping[str, Any]] | None = None  # a bias, seen as one more column

    @property
    def param(self) -> Tensor:
        return self.own if self.beside is None else columns(self.own, self.beside[0])

    def lr(self) -> Scalar:
        """As found; 1 for the few that find their own rate and have None here."""
        lr: Scalar | None = self.group.get("lr")
        return 1.0 if lr is None else lr

    def tensor(self, key: str) -> Tensor | None:
        """A state tensor in the gradient's dtype; None before the first step (torch: zeros)."""
        value: Tensor | None = self.state.get(key)
        if value is not None and self.beside is not None:
            value = columns(value, self.beside[1][key])
        return None if value is None else value.to(self.grad.dtype)

    def count(self) -> Scalar:
        """The number of the coming step, from 1."""
        return scalar(self.state.get("step", 0.0)) + 1

    def betas(self) -> tuple[Scalar, Scalar]:
        beta1, beta2 = self.group["betas"]
        return scalar(beta1), scalar(beta2)

    def decoupled(self) -> bool:
        """Whether weight decay stays out of the gradient; an older AdamW does not say so itself."""
        default = isinstance(self.optimizer, torch.optim.AdamW)
        return bool(self.group.get("decoupled_weight_decay", default))

    def decays(self) -> bool:
        decay = self.group["weight_decay"]
        return isinstance(decay, Tensor) or decay != 0

    def descent(self) -> Tensor:
        """The gradient that enters the formulas. May be `grad` itself: not to be written."""
        descent = -self.grad if self.group.get("maximize", False) else self.grad
        if self.decoupled() or not self.decays():
            return descent
        return _plus(descent, self.param, scalar(self.group["weight_decay"]))

    def move(self, descent: Tensor, gain: Scalar, memory: Tensor | None, k: Scalar) -> Tensor:
        """`-gain * (descent + k * memory)`, less the decoupled weight decay."""
        total = _plus(descent, memory, k)
        if not (self.decoupled() and self.decays()):
            return (total * gain).neg_()
        decay = self.param.to(total.dtype) * -scalar(self.group["weight_decay"])
        if isinstance(gain, Tensor):
            return decay.addcmul_(total, gain, value=-1)
        return decay.sub_(total, alpha=gain)


def columns(matrix: Tensor, vector: Tensor) -> Tensor:
    """A head's weight and bias, or their states, side by side. [m, n], [m] -> [m, n + 1]."""
    return torch.cat((matrix, vector.unsqueeze(1)), 1)


def _plus(x: Tensor, y: Tensor | None, factor: Scalar) -> Tensor:
    """`x + factor * y`; `x` itself where there is nothing to add."""
    if y is None:
        return x
    if isinstance(factor, Tensor):
        return x + y.to(x.dtype) * factor
    return torch.add(x, y, alpha=factor)


def _mean_square(
    old: Tensor | None, descent: Tensor, decay: Scalar, factor: Scalar = 1.0
) -> Tensor:
    """`factor * (decay * old + (1 - decay) * descent**2)`, in new memory."""
    enters, stays = (1 - decay) * factor, decay * factor
    if old is None:
        return (descent * descent).mul_(enters)
    if isinstance(enters, Tensor):
        return (old * stays).addcmul_(descent, descent * enters)
    return (old * stays).addcmul_(descent, descent, value=enters)


def _over_root(factor: Scalar, square: Tensor, correction: Scalar, eps: float) -> Tensor:
    """`factor / (correction * sqrt(square) + eps)`, in the memory of `square`."""
    return square.sqrt_().mul_(correction / factor).add_(eps / factor).reciprocal_()


def sgd(view: OptimizerView) -> tuple[Tensor, Scalar]:
    momentum, nesterov = view.group["momentum"], view.group["nesterov"]
    buffer = view.tensor("momentum_buffer") if momentum != 0 else None
    # The first buffer is the gradient itself, whatever the dampening.
    enters = 1.0 if buffer is None else 1.0 - view.group["dampening"]
    gain = 1.0 + momentum * enters if nesterov else enters
    return _plus(view.descent() * -gain, buffer, -(momentum**2) if nesterov else -momentum), gain


def _adam(view: OptimizerView) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, descent = view.betas(), view.count(), view.descent()
    enters = (1 - beta1) / (1 - beta1**t)
    factor = 1 / (1 - beta2**t) / enters**2  # moved under the root: one operation less
    square = _mean_square(view.tensor("exp_avg_sq"), descent, beta2, factor)
    largest = view.tensor("max_exp_avg_sq") if view.group["amsgrad"] else None
    square = square if largest is None else torch.maximum(square, largest * factor)
    gain = square.sqrt_().add_(view.group["eps"] / enters).reciprocal_()
    return view.move(descent, gain, view.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _nadam(view: OptimizerView) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, descent = view.betas(), view.count(), view.descent()
    decay, product = view.group["momentum_decay"], view.state.get("mu_product")
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * decay))
    # A product of tensors, because torch rounds this one to the dtype of its state.
    one = torch.ones((), dtype=accum_dtype(torch.get_default_dtype()))
    product = scalar((one if product is None else product) * mu)
    of_grad, of_mean = (1 - mu) / (1 - product), mu_next / (1 - product * mu_next)
    enters = of_grad + of_mean * (1 - beta1)
    square = _mean_square(view.tensor("exp_avg_sq"), descent, beta2)
    gain = _over_root(enters, square, (1 - beta2**t) ** -0.5, view.group["eps"])
    return view.move(descent, gain, view.tensor("exp_avg"), of_mean * beta1 / enters), gain


def _radam(view: OptimizerView) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, descent = view.betas(), view.count(), view.descent()
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    gain, rectify = (1 - beta1) / (1 - beta1**t), length > 5
    if isinstance(rectify, Tensor) or rectify:
        # 6 stands in for lengths too short to be used, to keep the root real.
        rho, rho_inf = where(rectify, length, 6.0), where(longest > 5, longest, 6.0)
        r = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        square = _mean_square(view.tensor("exp_avg_sq"), descent, beta2)
        adapted = _over_root(gain * r * (1 - beta2**t) ** 0.5, square, 1.0, view.group["eps"])
        gain = where(rectify, adapted, gain)
    return view.move(descent, gain, view.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _adamax(view: OptimizerView) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, descent = view.betas(), view.count(), view.descent()
    peak, old = descent.abs().add_(view.group["eps"]), view.tensor("exp_inf")
    peak = peak if old is None else torch.maximum(peak, old * beta2)
    gain = peak.reciprocal_().mul_((1 - beta1) / (1 - beta1**t))
    return view.move(descent, gain, view.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _rmsprop(view: OptimizerView) -> tuple[Tensor, Scalar]:
    alpha, momentum, descent = view.group["alpha"], view.group["momentum"], view.descent()
    square = _mean_square(view.tensor("square_avg"), descent, alpha)
    if view.group["centered"]:
        old = view.tensor("grad_avg")
        mean = descent * (1 - alpha) if old is None else _plus(old * alpha, descent, 1 - alpha)
        square.addcmul_(mean, mean, value=-1)
        del mean  # Memory of the size of the parameter.
    gain = _over_root(1.0, square, 1.0, view.group["eps"])
    buffer = view.tensor("momentum_buffer") if momentum > 0 else None
    return _plus(descent * gain, buffer, momentum).neg_(), gain


def _adagrad(view: OptimizerView) -> tuple[Tensor, Scalar]:
    descent, total = view.descent(), view.tensor("sum")
    if total is None:  # A late group: here torch takes the default, not the group's own value.
        total = torch.full_like(descent, view.optimizer.defaults["initial_accumulator_value"])
    factor = 1 / (1 + (view.count() - 1) * view.group["lr_decay"])
    gain = _over_root(factor, torch.addcmul(total, descent, descent), 1.0, view.group["eps"])
    return (descent * gain).neg_(), gain


def _adadelta(view: OptimizerView) -> tuple[Tensor, Scalar]:
    descent, eps, moved = view.descent(), view.group["eps"], view.tensor("acc_delta")
    square = _mean_square(view.tensor("square_avg"), descent, view.group["rho"])
    moved = torch.full_like(descent, eps) if moved is None else moved + eps
    gain = moved.div_(square.add_(eps)).sqrt_()
    return (descent * gain).neg_(), gain


Rule: TypeAlias = Callable[[OptimizerView], tuple[Tensor, Scalar]]

RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Adamax: _adamax,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
}
