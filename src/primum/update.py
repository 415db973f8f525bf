"""What the optimizer is about to do to one parameter: its step and its gain.

Every formula is torch.optim's own, rearranged so that the present gradient stands apart:

    step = gain * (push - k * memory) - weight_decay * param,    push = -gradient

Nothing is modified and nothing waits for the device: a step count on the host is read there, one on
the device stays a 0-dim tensor. An optimizer without a formula is dry-run on a throw-away copy.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as _base
from torch.utils._pytree import tree_leaves

Scalar: TypeAlias = Tensor | float  # A tensor only where the host does not have the number.

PROBE_LR = 1e-3  # For lr = 0 in a dry run: near the limit, yet well above float32 rounding.
LEAST_SHARE = 1e-12  # Of the larger lr: a gain of 0 would divide by 0.
LEAST_COSINE = 1e-3  # A dry run's gain never takes step and gradient to be closer to orthogonal.


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


def predict(optimizer: Optimizer, param: Tensor, grad: Tensor) -> Update:
    """The update that `optimizer.step()` would make to `param` if its gradient were `grad`.

    Exact for the classes in `RULES` and for subclasses that keep their `step`; any other class is
    dry-run. Group and state are read anew at every call; what is patched onto the instance's `step`
    (by LR schedulers) is not looked at.

    Args:
        optimizer: holds `param`; left as it is.
        param: the parameter; may be half precision.
        grad: the gradient the optimizer would see, float32 or float64; the result has its dtype.
    """
    group = group_of(optimizer, param)
    seen = _Seen(optimizer, group, optimizer.state.get(param, {}), param, grad)
    with torch.no_grad():
        step, gain = _rule_for(type(optimizer))(seen)
    return Update(step.to(grad.dtype), gain, seen.lr())


def predict_head(head: nn.Linear, owners: Mapping[str, Optimizer], grad: Tensor) -> Update:
    """The update of a linear head, weight and bias side by side, per unit of the larger lr.

    `owners` maps "weight", and "bias" if that is trained, to their optimizers. `grad` is the
    gradient of this backward pass; what has accumulated in `.grad` before it is added.

    Shapes: grad, step [d_out, d_in + 1], without the last column if there is no bias.
    """
    weight, bias = head.weight, head.bias if "bias" in owners else None
    if bias is None:
        grad = grad if weight.grad is None else grad + weight.grad
        return predict(owners["weight"], weight, grad)
    if weight.grad is not None and bias.grad is not None:
        grad = grad + _columns(weight.grad, bias.grad)
    group = group_of(owners["weight"], weight)
    if group is group_of(owners["bias"], bias):
        optimizer = owners["weight"]
        states = [optimizer.state.get(param, {}) for param in (weight, bias)]
        counts = [_scalar(state.get("step", 0.0)) for state in states]
        known = isinstance(counts[0], float) and isinstance(counts[1], float)
        rule = _rule_for(type(optimizer))
        if known and counts[0] == counts[1] and rule is not _dry_run:
            seen = _Seen(optimizer, group, states[0], weight, grad, (bias, states[1]))
            with torch.no_grad():
                step, gain = rule(seen)
            return Update(step.to(grad.dtype), gain, seen.lr())
    parts = [
        predict(owners["weight"], weight, grad[:, :-1]),
        predict(owners["bias"], bias, grad[:, -1]),
    ]
    shares = _shares(parts[0].lr, parts[1].lr)
    steps = [part.step * share for part, share in zip(parts, shares, strict=True)]
    gains = [
        torch.ones_like(part.step) * (part.gain * share)
        for part, share in zip(parts, shares, strict=True)
    ]
    largest = parts[0].lr / shares[0]
    return Update(_columns(*steps), _columns(*gains), largest)


def _shares(*rates: Scalar) -> list[Scalar]:
    """Learning rates as fractions of the largest, never quite 0; all 1 if all are 0."""
    if any(isinstance(rate, Tensor) for rate in rates):
        stacked = torch.stack([torch.as_tensor(rate, dtype=torch.float64) for rate in rates])
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
            "anew (as LBFGS does), so what it will do cannot be predicted; use SGD or AdamW"
        )
    if rule is _sgd and group["momentum"] != 0 and group["dampening"] >= 1:
        raise ValueError(f"dampening must be < 1 for gradients to count, got {group['dampening']}")
    if rule is _dry_run:  # What cannot be copied shall fail here and not in a step.
        _probe(_Seen(optimizer, group, {}, param, param), param.detach(), 1.0)


@dataclass(frozen=True)
class _Seen:
    """What a rule sees: one parameter with its group, its state and its gradient."""

    optimizer: Optimizer
    group: dict[str, Any]
    state: Mapping[str, Any]
    own: Tensor
    grad: Tensor
    beside: tuple[Tensor, Mapping[str, Any]] | None = None  # a bias, seen as one more column

    @property
    def param(self) -> Tensor:
        return self.own if self.beside is None else _columns(self.own, self.beside[0])

    def lr(self) -> Scalar:
        """As found; 1 for the few that find their own rate and have None here."""
        lr: Scalar | None = self.group.get("lr")
        return 1.0 if lr is None else lr

    def tensor(self, key: str) -> Tensor | None:
        """A state tensor in the gradient's dtype; None before the first step (torch: zeros)."""
        value: Tensor | None = self.state.get(key)
        if value is not None and self.beside is not None:
            value = _columns(value, self.beside[1][key])
        return None if value is None else value.to(self.grad.dtype)

    def count(self) -> Scalar:
        """The number of the coming step, from 1."""
        return _scalar(self.state.get("step", 0.0)) + 1

    def betas(self) -> tuple[Scalar, Scalar]:
        beta1, beta2 = self.group["betas"]
        return _scalar(beta1), _scalar(beta2)

    def decoupled(self) -> bool:
        """Whether weight decay stays out of the gradient; an older AdamW does not say so itself."""
        default = isinstance(self.optimizer, torch.optim.AdamW)
        return bool(self.group.get("decoupled_weight_decay", default))

    def push(self) -> Tensor:
        """Minus the gradient that enters the formulas. May be `grad` itself: not to be written."""
        push = self.grad if self.group.get("maximize", False) else -self.grad
        return push if self.decoupled() else _minus(push, self.param, self.group["weight_decay"])

    def move(self, push: Tensor, gain: Scalar, memory: Tensor | None, k: Scalar) -> Tensor:
        """`gain * (push - k * memory)`, less the decoupled weight decay."""
        step = _minus(push, memory, k) * gain
        return _minus(step, self.param, self.group["weight_decay"]) if self.decoupled() else step


def _columns(matrix: Tensor, vector: Tensor) -> Tensor:
    """A head's weight and bias, or their states, side by side. [m, n], [m] -> [m, n + 1]."""
    return torch.cat((matrix, vector.unsqueeze(1)), 1)


def _on_host(value: Tensor) -> bool:
    """Whether `value` can be read without waiting for a device (and has data: no FakeTensor)."""
    return type(value) is Tensor and value.device.type == "cpu"


def _scalar(value: Scalar) -> Scalar:
    """A setting or a step count: a float where the host has it, else a 0-dim tensor.

    `tolist`, unlike `item`, dispatches nothing. On a device the arithmetic is in float64 (but for
    MPS, which has none): `1 - 0.999**t` begins with three good digits in float32.
    """
    if not isinstance(value, Tensor):
        return value
    if _on_host(value):
        number: Any = value.tolist()
        return float(number)
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def _where(condition: Tensor | bool, yes: Scalar, no: Scalar) -> Scalar:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _minus(x: Tensor, y: Tensor | None, factor: Scalar) -> Tensor:
    """`x - factor * y`; `x` itself where there is nothing to subtract."""
    factor = _scalar(factor)
    if isinstance(factor, Tensor):
        return x if y is None else x - y.to(x.dtype) * factor
    return x if y is None or factor == 0 else torch.sub(x, y, alpha=factor)


def _mean_square(old: Tensor | None, push: Tensor, decay: Scalar) -> Tensor:
    """`decay * old + (1 - decay) * push**2`, in new memory."""
    if old is None:
        return (push * push).mul_(1 - decay)
    if isinstance(decay, Tensor):
        return (old * decay).addcmul_(push, push * (1 - decay))
    return (old * decay).addcmul_(push, push, value=1 - decay)


def _over_root(factor: Scalar, square: Tensor, correction: Scalar, eps: float) -> Tensor:
    """`factor / (correction * sqrt(square) + eps)`, in the memory of `square`."""
    return square.sqrt_().mul_(correction / factor).add_(eps / factor).reciprocal_()


def _sgd(seen: _Seen) -> tuple[Tensor, Scalar]:
    momentum, nesterov = seen.group["momentum"], seen.group["nesterov"]
    buffer = seen.tensor("momentum_buffer") if momentum != 0 else None
    # The first buffer is the gradient itself, whatever the dampening.
    enters = 1.0 if buffer is None else 1.0 - seen.group["dampening"]
    gain = 1.0 + momentum * enters if nesterov else enters
    return _minus(seen.push() * gain, buffer, momentum**2 if nesterov else momentum), gain


def _adam(seen: _Seen) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, push = seen.betas(), seen.count(), seen.push()
    square = _mean_square(seen.tensor("exp_avg_sq"), push, beta2)
    largest = seen.tensor("max_exp_avg_sq") if seen.group["amsgrad"] else None
    square = square if largest is None else torch.maximum(square, largest)
    enters = (1 - beta1) / (1 - beta1**t)
    gain = _over_root(enters, square, (1 - beta2**t) ** -0.5, seen.group["eps"])
    return seen.move(push, gain, seen.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _nadam(seen: _Seen) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, push = seen.betas(), seen.count(), seen.push()
    decay, product = seen.group["momentum_decay"], seen.state.get("mu_product")
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * decay))
    # A product of tensors, because torch rounds this one to the dtype of its state.
    wide = torch.get_default_dtype() == torch.float64
    one = torch.ones((), dtype=torch.float64 if wide else torch.float32)
    product = _scalar((one if product is None else product) * mu)
    of_grad, of_mean = (1 - mu) / (1 - product), mu_next / (1 - product * mu_next)
    enters = of_grad + of_mean * (1 - beta1)
    square = _mean_square(seen.tensor("exp_avg_sq"), push, beta2)
    gain = _over_root(enters, square, (1 - beta2**t) ** -0.5, seen.group["eps"])
    return seen.move(push, gain, seen.tensor("exp_avg"), of_mean * beta1 / enters), gain


def _radam(seen: _Seen) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, push = seen.betas(), seen.count(), seen.push()
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    gain, rectify = (1 - beta1) / (1 - beta1**t), length > 5
    if isinstance(rectify, Tensor) or rectify:
        # 6 stands in for lengths too short to be used, to keep the root real.
        rho, rho_inf = _where(rectify, length, 6.0), _where(longest > 5, longest, 6.0)
        r = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        square = _mean_square(seen.tensor("exp_avg_sq"), push, beta2)
        adapted = _over_root(gain * r * (1 - beta2**t) ** 0.5, square, 1.0, seen.group["eps"])
        gain = _where(rectify, adapted, gain)
    return seen.move(push, gain, seen.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _adamax(seen: _Seen) -> tuple[Tensor, Scalar]:
    (beta1, beta2), t, push = seen.betas(), seen.count(), seen.push()
    peak, old = push.abs().add_(seen.group["eps"]), seen.tensor("exp_inf")
    peak = peak if old is None else torch.maximum(peak, old * beta2)
    gain = peak.reciprocal_().mul_((1 - beta1) / (1 - beta1**t))
    return seen.move(push, gain, seen.tensor("exp_avg"), beta1 / (1 - beta1)), gain


def _rmsprop(seen: _Seen) -> tuple[Tensor, Scalar]:
    alpha, momentum, push = seen.group["alpha"], seen.group["momentum"], seen.push()
    square = _mean_square(seen.tensor("square_avg"), push, alpha)
    if seen.group["centered"]:
        old = seen.tensor("grad_avg")
        mean = push * (alpha - 1) if old is None else _minus(old * alpha, push, 1 - alpha)
        square.addcmul_(mean, mean, value=-1)
        del mean  # Memory of the size of the parameter.
    gain = _over_root(1.0, square, 1.0, seen.group["eps"])
    buffer = seen.tensor("momentum_buffer") if momentum > 0 else None
    return _minus(push * gain, buffer, momentum), gain


def _adagrad(seen: _Seen) -> tuple[Tensor, Scalar]:
    push, total = seen.push(), seen.tensor("sum")
    if total is None:  # A late group: here torch takes the default, not the group's own value.
        total = torch.full_like(push, seen.optimizer.defaults["initial_accumulator_value"])
    factor = 1 / (1 + (seen.count() - 1) * seen.group["lr_decay"])
    gain = _over_root(factor, torch.addcmul(total, push, push), 1.0, seen.group["eps"])
    return push * gain, gain


def _adadelta(seen: _Seen) -> tuple[Tensor, Scalar]:
    push, eps, moved = seen.push(), seen.group["eps"], seen.tensor("acc_delta")
    square = _mean_square(seen.tensor("square_avg"), push, seen.group["rho"])
    moved = torch.full_like(push, eps) if moved is None else moved + eps
    gain = moved.div_(square.add_(eps)).sqrt_()
    return push * gain, gain


Rule: TypeAlias = Callable[[_Seen], tuple[Tensor, Scalar]]

RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Adamax: _adamax,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
}


def _rule_for(kind: type[Optimizer]) -> Rule:
    """The rule of a known class, or of a subclass that steps as its parent does; else a dry run."""
    for known, rule in RULES.items():
        if issubclass(kind, known) and all(
            _unhooked(getattr(kind, name)) is _unhooked(getattr(known, name))
            for name in ("step", "_init_group")
        ):
            return rule
    return _dry_run


_HOOKED = Optimizer.profile_hook_step(Optimizer.step).__code__


def _unhooked(function: Any) -> Any:
    """A `step` without the wrapper, put around it by torch, that runs the hooks."""
    while getattr(function, "__code__", None) is _HOOKED:
        function = function.__wrapped__
    return function


def _dry_run(seen: _Seen) -> tuple[Tensor, Scalar]:
    """Step throw-away copies with `grad` and with zero; the gain is the multiple of `grad` between.

    That fit is exact for an optimizer linear in the present gradient, and still says something for
    one that takes signs or divides by a norm, where a small change along `grad` changes nothing.
    Where it is not positive, the whole step is fitted instead. It is an approximation: one number
    for all entries, the parameter seen alone. Half precision is stepped in the dtype of `grad`;
    `lr = 0` is replaced by `PROBE_LR`. Waits for the device only where the class's own step does.
    """
    lr = _where(seen.lr() == 0, PROBE_LR, seen.lr())

    def displacement(grad: Tensor) -> Tensor:
        probe, clone = _probe(seen, grad, lr)
        with _undisturbed(seen.param):
            _unhooked(type(probe).step)(probe)
        vars(probe).clear()  # An attribute may refer to the probe: leave no cycle behind.
        return (clone.detach() - seen.param) / lr

    step, push = displacement(seen.grad), seen.grad if seen.group.get("maximize") else -seen.grad
    size, length = (push * push).sum(), (step * step).sum()
    response = ((step - displacement(torch.zeros_like(push))) * push).sum() / size
    whole = torch.maximum((step * push).sum() / size, LEAST_COSINE * (length / size).sqrt())
    gain = torch.ones_like(size)
    for fit in (whole, response):
        gain = torch.where((fit > 0) & fit.isfinite(), fit, gain)
    return step, gain


def _probe(seen: _Seen, grad: Tensor, lr: Scalar) -> tuple[Optimizer, Tensor]:
    """A throw-away optimizer that holds a copy of the parameter alone, and that copy.

    Made without the constructor, whose signature is unknown: all that hangs on the instance is
    copied, hooks and patches of `step` excepted. Other parameters become one empty stand-in.
    """
    optimizer, param, held = seen.optimizer, seen.param, vars(seen.optimizer)
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

    probe: Optimizer = object.__new__(type(optimizer))
    parts = {k: OrderedDict() if k.endswith("_hooks") else v for k, v in held.items()}
    parts.pop("step", None)
    state = {k: v for k, v in optimizer.state.items() if k is param or not isinstance(k, Tensor)}
    parts["state"] = defaultdict(dict, state)
    own_rate = seen.group.get("lr") is None
    parts["param_groups"] = [{**seen.group, "params": [param]} | ({} if own_rate else {"lr": lr})]
    nothing = torch.empty(0)
    memo: dict[int, Any] = {id(p): nothing for g in optimizer.param_groups for p in g["params"]}
    memo |= {id(x): copied(x) for x in tree_leaves(list(state.values())) if isinstance(x, Tensor)}
    try:
        vars(probe).update(copy.deepcopy(parts, memo | {id(optimizer): probe, id(param): clone}))
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be copied for a dry run: {error}") from error
    return probe, clone


@contextmanager
def _undisturbed(param: Tensor) -> Iterator[None]:
    """Put back torch's random state, of the CPU and the device; let global step hooks sleep."""
    hooks: list[Any] = [_base._global_optimizer_pre_hooks, _base._global_optimizer_post_hooks]
    asleep = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with torch.random.fork_rng(devices=[param.device] if param.is_cuda else []):
            yield
    finally:
        for each, kept in zip(hooks, asleep, strict=True):
            each.update(kept)
