"""The oracle is a deep copy of (parameter, optimizer) that really steps."""

import copy
import functools
import gc
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from primum.kernel import scalars
from primum.kernel.optimizers import dry_run as dry_runs
from primum.kernel.optimizers import rules
from primum.kernel.optimizers.dry_run import dry_run
from primum.kernel.optimizers.predict import (
    Update,
    check_supported,
    group_of,
    predict,
    rule_for,
)

# Large, and a power of two: `(new - old) / lr` then loses nothing by dividing, and rounding `new`
# to the grid of the parameter costs eps * |new| / (lr * |step|), about eps, as parameters are of
# order 1 and steps of order 1 to 0.001. A small lr would measure that rounding, not the prediction.
LR = 64.0

# Norm-relative: entries of a step may cancel to almost nothing while their rounding error does not.
# A dozen roundings of size eps (2e-16, 1e-7) on either side, with room for some cancellation.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}

STEPS = 15  # RAdam is unrectified for the first five.

SHAPE = (7, 5)

TENSOR_BETAS = {"betas": (torch.tensor(0.75), torch.tensor([0.9375])), "foreach": False}


def takes_tensor_betas() -> bool:
    """Whether this torch steps with them; older versions raise."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    try:
        optim.Adam([param], **TENSOR_BETAS).step()
    except (TypeError, ValueError):
        return False
    return True


OPTIONS: dict[type[optim.Optimizer], list[dict]] = {
    optim.SGD: [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True, "fused": True},
        {"momentum": 0.9, "lr": torch.tensor(LR)},
        {"momentum": 0.9, "weight_decay": 0.1, "differentiable": True},
    ],
    optim.Adam: [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "amsgrad": True},
        {"amsgrad": True, "betas": (0.5, 0.6)},
        {"betas": (0.0, 0.99), "eps": 0.1},
        *([TENSOR_BETAS] if takes_tensor_betas() else []),
        {"weight_decay": 0.1, "foreach": True, "maximize": True},
        {"weight_decay": 0.1, "fused": True},
        {"amsgrad": True, "maximize": True, "fused": True},
        {"lr": torch.tensor(LR), "foreach": False},
        {"weight_decay": 0.1, "amsgrad": True, "differentiable": True},
    ],
    optim.AdamW: [
        {"weight_decay": 0.1},
        {"weight_decay": 0.0},
        {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
        {"weight_decay": 0.1, "foreach": True},
        {"weight_decay": 0.1, "fused": True, "amsgrad": True},
        {"weight_decay": 0.1, "lr": torch.tensor(LR), "foreach": False},
        {"weight_decay": 0.1, "lr": torch.tensor([LR], dtype=torch.float64), "foreach": False},
    ],
    optim.NAdam: [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "foreach": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1},
        {"momentum_decay": 0.0, "betas": (0.5, 0.9), "foreach": False},
    ],
    optim.RAdam: [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "foreach": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"betas": (0.9, 0.6)},  # Never rectified: the longest average is exactly 4.
        {"betas": (0.9, 0.71), "foreach": False},  # A longest average between 5 and 6.
    ],
    optim.Adamax: [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "foreach": True},
        {"betas": (0.5, 0.6), "eps": 0.1, "foreach": False},
    ],
    optim.RMSprop: [
        {},
        {"weight_decay": 0.1, "momentum": 0.9},
        {"weight_decay": 0.1, "momentum": 0.9, "centered": True, "maximize": True},
        {"centered": True, "foreach": True},
        {"momentum": 0.5, "alpha": 0.5, "eps": 0.1, "foreach": False},
        {"lr": torch.tensor(LR), "foreach": False},
    ],
    optim.Adagrad: [
        {},
        {"lr_decay": 0.3, "weight_decay": 0.1},
        {"lr_decay": 0.3, "weight_decay": 0.1, "maximize": True, "foreach": True},
        {"initial_accumulator_value": 2.0, "lr_decay": 0.1, "foreach": False},
        {"lr_decay": 0.3, "fused": True},
    ],
    optim.Adadelta: [
        {},
        {"weight_decay": 0.1, "rho": 0.5},
        {"weight_decay": 0.1, "maximize": True, "foreach": True},
        {"eps": 0.1, "foreach": False},
    ],
}


def _label(value: object) -> object:
    if isinstance(value, type):
        return value.__name__
    return ",".join(f"{k}={v}" for k, v in value.items()) or "plain"  # type: ignore[attr-defined]


CASES = [
    pytest.param(cls, kw, id=f"{cls.__name__}-{_label(kw)}")
    for cls, options in OPTIONS.items()
    for kw in options
]
PLAIN = list(OPTIONS)
by_class = pytest.mark.parametrize("cls", PLAIN, ids=_label)
by_case = pytest.mark.parametrize(("cls", "kw"), CASES)
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def build(cls, dtype=torch.float64, shape=SHAPE, **kw):
    # torch does the arithmetic of a setting given as a tensor in the dtype of that tensor.
    kw = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in kw.items()}
    if "betas" in kw:
        kw["betas"] = tuple(b.to(dtype) if isinstance(b, Tensor) else b for b in kw["betas"])
    values = torch.randn(shape, dtype=dtype)
    # A differentiable optimizer writes under autograd, which a leaf that requires grad forbids.
    param = values if kw.get("differentiable") else nn.Parameter(values)
    return cls([param], **{"lr": LR, **kw}), param


def gradient(param: Tensor) -> Tensor:
    """Bounded away from zero, so that dividing by a gradient in an oracle means something."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return (torch.rand(param.shape) + 0.5).to(dtype) * torch.randn(param.shape).sign().to(dtype)


def really_step(optimizer, param: Tensor, grad: Tensor) -> Tensor:
    """Displacement per unit lr of a deep copy."""
    twin_param, twin = copy.deepcopy((param, optimizer))
    # A deep copy forgets what hangs on the parameter or on the instance.
    vars(twin_param).update(vars(param))
    vars(twin).update({k: copy.deepcopy(v) for k, v in vars(optimizer).items() if k == "history"})
    twin_param.grad = grad.to(param.dtype, copy=True)
    twin.step()
    lr = group_of(optimizer, param)["lr"]
    return (twin_param.detach() - param.detach()) / (lr.double() if isinstance(lr, Tensor) else lr)


def advance(optimizer, param: Tensor, grad: Tensor) -> None:
    """Step, then put the parameter back to order 1; no optimizer here remembers the parameter."""
    param.grad = grad.to(param.dtype, copy=True)
    optimizer.step()
    with torch.no_grad():
        param.copy_(torch.randn(param.shape))


def as_tensor(gain: Tensor | float) -> Tensor:
    return torch.as_tensor(gain, dtype=torch.float64)


def error(got: Tensor, true: Tensor) -> float:
    return float((got - true).norm() / true.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _wide_counts(kw) -> Iterator[None]:
    """A differentiable optimizer does its scalar arithmetic in the dtype of its step count."""
    torch.set_default_dtype(torch.float64 if kw.get("differentiable") else torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


class Count(TorchDispatchMode):
    """Counts dispatched operations, and how many tensors as large as `param` live at a time."""

    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.numel, self.peak = param.numel(), 0
        self.live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        if not any(out is x for x in args) and out.numel() >= self.numel:
            self.live.add(out.untyped_storage())
        self.peak = max(self.peak, len(self.live))
        return out


# --- step -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_wide_counts")
@by_dtype
@by_case
def test_step_is_what_a_real_step_does(cls, kw, dtype):
    optimizer, param = build(cls, dtype, **kw)
    for _ in range(STEPS):
        grad = gradient(param)
        got = predict(optimizer, param, grad)
        assert got.step.dtype == grad.dtype
        assert got.step.shape == param.shape
        assert got.lr is optimizer.param_groups[0]["lr"]
        assert error(got.step, really_step(optimizer, param, grad)) < TOLERANCE[dtype]
        advance(optimizer, param, grad)


@pytest.mark.usefixtures("_wide_counts")
@by_case
def test_step_counts_on_the_device_give_the_same(cls, kw, monkeypatch):
    monkeypatch.setattr(scalars, "on_host", lambda value: False)
    # torch rounds NAdam's running product to the float32 of its state; the device path does not.
    tolerance = 1e-6 if cls is optim.NAdam else TOLERANCE[torch.float64]
    optimizer, param = build(cls, **kw)
    for _ in range(STEPS):
        grad = gradient(param)
        assert error(predict(optimizer, param, grad).step, really_step(optimizer, param, grad)) < (
            tolerance
        )
        advance(optimizer, param, grad)


@by_class
def test_both_paths_agree_in_gain_too(cls, monkeypatch):
    optimizer, param = build(cls)
    for _ in range(STEPS):
        grad = gradient(param)
        host = predict(optimizer, param, grad)
        with monkeypatch.context() as patch:
            patch.setattr(scalars, "on_host", lambda value: False)
            device = predict(optimizer, param, grad)
        torch.testing.assert_close(
            as_tensor(host.gain).expand(SHAPE),
            as_tensor(device.gain).expand(SHAPE),
            rtol=1e-6 if cls is optim.NAdam else 1e-12,
            atol=0,
        )
        advance(optimizer, param, grad)


@by_class
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_predicted_in_float32(cls, dtype):
    optimizer, param = build(cls, dtype, eps=1e-3) if cls is not optim.SGD else build(cls, dtype)
    for _ in range(4):
        grad = gradient(param).to(dtype).float()
        got = predict(optimizer, param, grad)
        assert got.step.dtype == torch.float32
        # The real step rounds states, intermediate values and the parameter to 8 (or 11) bits.
        true = really_step(optimizer, param, grad).float()
        assert error(got.step, true) < 8 * torch.finfo(dtype).eps
        advance(optimizer, param, grad)


def test_scalar_parameter_keeps_its_dtype(monkeypatch):
    monkeypatch.setattr(scalars, "on_host", lambda value: False)
    optimizer, param = build(optim.NAdam, torch.float32, shape=())
    advance(optimizer, param, gradient(param))
    assert predict(optimizer, param, gradient(param)).step.dtype == torch.float32


def test_each_group_has_its_own_settings():
    a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    optimizer = optim.SGD(
        [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 2.0, "momentum": 0.5, "nesterov": True}]
    )
    assert (predict(optimizer, a, torch.ones(3)).lr, predict(optimizer, b, torch.ones(3)).lr) == (
        1.0,
        2.0,
    )
    assert predict(optimizer, a, torch.ones(3)).gain == 1.0
    assert predict(optimizer, b, torch.ones(3)).gain == 1.5


def test_adagrad_group_added_late_starts_from_the_default():
    optimizer, _ = build(optim.Adagrad, initial_accumulator_value=3.0)
    late = nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))
    optimizer.add_param_group({"params": [late], "initial_accumulator_value": 100.0})
    grad = gradient(late)
    try:
        true = really_step(optimizer, late, grad)
    except KeyError:
        pytest.skip("this torch makes no state for a group that is added late")
    assert error(predict(optimizer, late, grad).step, true) < 1e-13


def test_follows_load_state_dict_and_add_param_group():
    optimizer, param = build(optim.AdamW)
    for _ in range(3):
        advance(optimizer, param, gradient(param))
    other, other_param = build(optim.AdamW)
    grad = gradient(param)
    predict(other, other_param, grad)
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        other_param.copy_(param)
    assert torch.equal(predict(other, other_param, grad).step, predict(optimizer, param, grad).step)
    late = nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match="does not hold this parameter"):
        group_of(other, late)
    other.add_param_group({"params": [late], "lr": 5.0})
    assert group_of(other, late) is other.param_groups[1]
    assert predict(other, late, torch.ones(3)).lr == 5.0


@by_class
def test_zero_learning_rate_changes_nothing_per_unit(cls):
    optimizer, param = build(cls)
    grad = gradient(param)
    advance(optimizer, param, grad)
    expected = predict(optimizer, param, grad)
    optimizer.param_groups[0]["lr"] = 0.0
    assert torch.equal(predict(optimizer, param, grad).step, expected.step)


# --- gain -----------------------------------------------------------------------------------------


def seen_gradient(optimizer, param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as it enters the formulas: turned round by maximize, with L2 weight decay."""
    group = group_of(optimizer, param)
    grad = -grad if group["maximize"] else grad
    coupled = not group.get("decoupled_weight_decay", False)
    return grad + group["weight_decay"] * param.detach() if coupled else grad


def hold_denominators(optimizer, param: Tensor, old: Tensor, new: Tensor) -> None:
    """Change the state so that gradient `new` leads to the denominators that `old` leads to."""
    group, state = group_of(optimizer, param), optimizer.state[param]
    cls = type(optimizer)
    if cls in (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adadelta, optim.RMSprop):
        key = "exp_avg_sq" if "exp_avg_sq" in state else "square_avg"
        decay = group["betas"][1] if "betas" in group else group.get("rho", group.get("alpha"))
        shift = (1 - decay) * (old**2 - new**2)
        if group.get("centered"):
            means = [decay * state["grad_avg"] + (1 - decay) * x for x in (old, new)]
            shift += means[1] ** 2 - means[0] ** 2
        state[key] += shift / decay
    elif cls is optim.Adamax:
        beta = group["betas"][1]
        state["exp_inf"] = torch.maximum(state["exp_inf"], (old.abs() + group["eps"]) / beta)
    elif cls is optim.Adagrad:
        state["sum"] += old**2 - new**2


@pytest.mark.usefixtures("_wide_counts")
@by_case
def test_gain_is_the_response_of_a_real_step_with_denominators_held(cls, kw):
    """Two real steps with different gradients, from states that end in the same denominators."""
    if any(isinstance(beta, Tensor) for beta in kw.get("betas", ())):
        kw = {**kw, "betas": tuple(beta.item() for beta in kw["betas"])}
    optimizer, param = build(cls, **kw)
    for step in range(STEPS):
        grad = gradient(param)
        got = predict(optimizer, param, grad)
        old = seen_gradient(optimizer, param, grad)
        new = old / 2  # Smaller, as Adamax' denominator can be held only from above.
        other = grad + (new - old) * (-1 if optimizer.param_groups[0]["maximize"] else 1)
        twin_param, twin = copy.deepcopy((param, optimizer))
        if step or cls is optim.Adagrad or cls is optim.SGD:
            hold_denominators(twin, twin_param, old, new)
            change = really_step(twin, twin_param, other) - really_step(optimizer, param, grad)
            true = -change / (new - old)
        else:  # Without a state the step is gain * push; the state cannot be prepared.
            decay = kw.get("weight_decay", 0.0) if got_decoupled(optimizer) else 0.0
            true = -(really_step(optimizer, param, grad) + decay * param.detach()) / old
        gain = as_tensor(got.gain).expand(SHAPE)
        assert (gain > 0).all()
        # A difference of two steps divided by a difference of gradients: some digits are lost.
        torch.testing.assert_close(gain.double(), true.double(), rtol=1e-8, atol=0)
        advance(optimizer, param, grad)


def got_decoupled(optimizer) -> bool:
    default = isinstance(optimizer, optim.AdamW)  # before torch 2.7 it does not say so itself
    return bool(optimizer.param_groups[0].get("decoupled_weight_decay", default))


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.RAdam, optim.Adamax], ids=_label)
def test_gain_agrees_with_the_response_to_the_first_moment(cls):
    """The gradient enters the mean with 1 - beta1, the old mean with beta1: a second witness."""
    optimizer, param = build(cls)
    for _ in range(STEPS):
        advance(optimizer, param, gradient(param))
    grad, nudge = gradient(param), torch.randn(SHAPE, dtype=torch.float64).sign()
    twin_param, twin = copy.deepcopy((param, optimizer))
    twin.state[twin_param]["exp_avg"] += nudge
    change = really_step(twin, twin_param, grad) - really_step(optimizer, param, grad)
    beta1 = optimizer.param_groups[0]["betas"][0]
    gain = predict(optimizer, param, grad).gain
    torch.testing.assert_close(gain, -(1 - beta1) / beta1 * change / nudge, rtol=1e-8, atol=0)


def test_gain_is_a_number_where_it_is_one_number():
    for kw, first, later in [
        ({}, 1.0, 1.0),
        ({"momentum": 0.5}, 1.0, 1.0),
        ({"momentum": 0.5, "dampening": 0.25}, 1.0, 0.75),
        ({"momentum": 0.5, "nesterov": True, "maximize": True}, 1.5, 1.5),
    ]:
        optimizer, param = build(optim.SGD, **kw)
        grad = gradient(param)
        assert predict(optimizer, param, grad).gain == first
        advance(optimizer, param, grad)
        assert predict(optimizer, param, grad).gain == later
    optimizer, param = build(optim.RAdam)
    assert isinstance(predict(optimizer, param, gradient(param)).gain, float)


# --- nothing modified, nothing waited for, few operations -----------------------------------------


def everything(optimizer, param: Tensor, grad: Tensor) -> list:
    """Each tensor with its values and its version, each setting, in order."""
    found = [(param, param.grad), grad, optimizer.state, optimizer.param_groups, vars(optimizer)]
    leaves = torch.utils._pytree.tree_leaves([found[0], grad, dict(optimizer.state), found[3]])
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return [
        [(id(x), x._version, x.detach().clone()) for x in tensors],
        [x for x in leaves if not isinstance(x, Tensor)],
        list(vars(optimizer)),
        list(optimizer.state),
        torch.get_rng_state(),
    ]


def assert_same(a: list, b: list) -> None:
    assert [x[:2] for x in a[0]] == [x[:2] for x in b[0]]
    for x, y in zip(a[0], b[0], strict=True):
        assert torch.equal(x[2], y[2])
    assert a[1:3] == b[1:3]
    assert [id(k) for k in a[3]] == [id(k) for k in b[3]]
    assert torch.equal(a[4], b[4])


@by_case
def test_nothing_is_modified(cls, kw):
    optimizer, param = build(cls, **kw)
    for _ in range(3):
        grad = gradient(param)
        before = everything(optimizer, param, grad)
        got = predict(optimizer, param, grad)
        assert_same(everything(optimizer, param, grad), before)
        assert not got.step.requires_grad
        assert got.step.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()
        advance(optimizer, param, grad)


@by_case
def test_few_operations_and_no_host_sync(cls, kw):
    most = {optim.SGD: 5, optim.Adam: 12, optim.AdamW: 12}.get(cls, 14)
    optimizer, param = build(cls, torch.float32, **kw)
    for _ in range(8):
        grad = gradient(param)
        with Count(param) as count:
            predict(optimizer, param, grad)
        assert not {"_local_scalar_dense", "item", "is_nonzero", "equal"} & set(count.ops)
        assert count.ops.total() <= most, count.ops
        assert count.peak <= 4
        advance(optimizer, param, grad)


@by_class
def test_no_host_sync_with_counts_on_the_device(cls, monkeypatch):
    monkeypatch.setattr(scalars, "on_host", lambda value: False)
    optimizer, param = build(cls, torch.float32)
    for _ in range(3):
        grad = gradient(param)
        with Count(param) as count:
            predict(optimizer, param, grad)
        assert not {"_local_scalar_dense", "item", "is_nonzero", "equal"} & set(count.ops)
        advance(optimizer, param, grad)


@pytest.mark.parametrize("counts_on", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [0, 3])
@by_case
def test_works_on_a_device_whose_values_are_unknown(cls, kw, steps, counts_on):
    """FakeTensor raises on anything that would have to wait for the device."""
    optimizer, param = build(cls, torch.float32, **{**kw, "differentiable": False})
    for _ in range(steps):
        advance(optimizer, param, gradient(param))

    with FakeTensorMode():

        def faked(value, device="cuda"):
            if not isinstance(value, Tensor):
                return value
            device = counts_on if value.dim() == 0 else device
            return torch.empty(value.shape, dtype=value.dtype, device=device)

        fake = faked(param)
        state = {k: faked(v) for k, v in optimizer.state.get(param, {}).items()}
        group = optimizer.param_groups[0]
        group["params"], group["lr"] = [fake], torch.empty((), device="cuda")
        if "betas" in group:
            group["betas"] = tuple(faked(beta) for beta in group["betas"])
        optimizer.state = defaultdict(dict, {fake: state} if state else {})
        got = predict(optimizer, fake, torch.empty(SHAPE, device="cuda"))
        assert got.lr is group["lr"]
        assert got.step.device.type == "cuda"
        assert got.step.shape == SHAPE
        assert got.step.dtype == torch.float32


# --- ugly gradients -------------------------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cls=st.sampled_from(PLAIN),
    scales=st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3, 1e6]), min_size=1, max_size=5),
    shape=st.sampled_from([(1,), (4,), (3, 2), (0, 3)]),
    maximize=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_scale(cls, scales, shape, maximize, seed):
    torch.manual_seed(seed)
    optimizer, param = build(cls, shape=shape, maximize=maximize)
    for scale in scales:
        grad = scale * torch.randn(shape, dtype=torch.float64)
        got, true = predict(optimizer, param, grad), really_step(optimizer, param, grad)
        # The oracle rounds `new` to the grid of the parameter.
        grid = 4 * torch.finfo(torch.float64).eps * (param.detach().norm() / LR + true.norm())
        assert (got.step - true).norm() <= 1e-11 * true.norm() + grid
        gain = as_tensor(got.gain)
        assert (gain > 0).all()
        assert gain.isfinite().all()
        advance(optimizer, param, grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@by_class
def test_bad_values_are_passed_on_without_an_exception(cls, value):
    optimizer, param = build(cls)
    grad = gradient(param)
    grad[0, 0] = value
    for _ in range(7):
        got, true = predict(optimizer, param, grad), really_step(optimizer, param, grad)
        assert torch.equal(got.step.isfinite(), true.isfinite())
        advance(optimizer, param, grad)


# --- other classes --------------------------------------------------------------------------------


class Lion(optim.Optimizer):
    """Takes a sign; its constructor has a signature of its own; changes the gradient in place."""

    def __init__(self, *, weights, rate, beta=0.9):
        super().__init__(weights, {"lr": rate, "beta": beta, "weight_decay": 0.1})
        self.history = []

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.requires_grad:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.grad.mul_(1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(
                    (group["beta"] * mean + p.grad).sign() * getattr(p, "scale", 1.0) * -group["lr"]
                )
                mean.mul_(0.99).add_(p.grad, alpha=0.1)
                self.history.append(1)


class ScaledAdam(optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(3.0)
        return super().step(closure)


class ScaledInitAdam(optim.Adam):
    def _init_group(self, group, params, grads, *rest):
        result = super()._init_group(group, params, grads, *rest)
        grads[:] = [g * 3.0 for g in grads]
        return result


class PlainAdam(optim.Adam):
    """Overrides nothing: keeps the exact rule."""


class LinearSGD(optim.Optimizer):
    def __init__(self, params, lr, factor=2.5, **defaults):
        super().__init__(params, {"lr": lr, "factor": factor, "maximize": False, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            sign = 1 if group["maximize"] else -1
            for p in group["params"]:
                memory = self.state[p].setdefault("memory", torch.zeros_like(p))
                p.add_(sign * group["factor"] * p.grad - memory, alpha=group["lr"])
                memory.lerp_(p.grad, 0.5)


class NoisySGD(LinearSGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.5)
        super().step()


def lion(params, lr, **kw):
    return Lion(weights=params, rate=lr, **kw)


OTHERS = [
    pytest.param(cls, kw, id=getattr(cls, "__name__", "?"))
    for cls, kw in [
        (lion, {}),
        (ScaledAdam, {}),
        (ScaledInitAdam, {}),
        (LinearSGD, {}),
        (NoisySGD, {}),
        (optim.Rprop, {}),
        (optim.ASGD, {"lambd": 1e-4}),
        (getattr(optim, "Adafactor", None), {"lr": 0.5}),
        (getattr(optim, "Muon", None), {"lr": 0.5}),
    ]
    if cls is not None
]
by_other = pytest.mark.parametrize(("cls", "kw"), OTHERS)


@by_dtype
@by_other
def test_dry_run_is_what_a_real_step_does(cls, kw, dtype):
    optimizer, param = build(cls, dtype, **kw)
    check_supported(optimizer, param)
    for _ in range(5):
        grad = gradient(param)
        before = everything(optimizer, param, grad)
        got = predict(optimizer, param, grad)
        assert_same(everything(optimizer, param, grad), before)
        rng = torch.get_rng_state()
        true = really_step(optimizer, param, grad)
        torch.set_rng_state(rng)
        assert error(got.step, true) < TOLERANCE[dtype]
        assert got.gain.shape == ()
        assert got.gain > 0
        assert got.gain.isfinite()
        advance(optimizer, param, grad)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("cls", [LinearSGD, NoisySGD], ids=_label)
def test_dry_run_gain_is_exact_for_a_linear_optimizer(cls, maximize):
    optimizer, param = build(cls, maximize=maximize)
    for _ in range(3):
        grad = gradient(param)
        gain = predict(optimizer, param, grad).gain
        torch.testing.assert_close(gain, torch.tensor(2.5, dtype=torch.float64), rtol=1e-12, atol=0)
        advance(optimizer, param, grad)


def test_dry_run_gain_is_of_the_size_of_the_exact_one():
    """ScaledAdam on g is Adam on 3 g: its one gain lies within the range of Adam's, times 3."""
    optimizer, param = build(ScaledAdam)
    for _ in range(STEPS):
        grad = gradient(param)
        exact = (
            3
            * rules._adam(
                rules.OptimizerView(
                    optimizer,
                    optimizer.param_groups[0],
                    optimizer.state.get(param, {}),
                    param,
                    3 * grad,
                )
            )[1]
        )
        got = predict(optimizer, param, grad).gain
        # Here the denominators move with the gradient, which the exact gain holds.
        assert 0.5 * exact.min() <= got <= 2 * exact.max()
        advance(optimizer, param, grad)


@pytest.mark.parametrize("fill", [0.0, 1e-30, float("nan"), float("inf")])
@by_other
def test_dry_run_gain_is_positive_and_finite_whatever_the_gradient(cls, kw, fill):
    optimizer, param = build(cls, torch.float32, **kw)
    for _ in range(2):
        got = predict(optimizer, param, torch.full(SHAPE, fill))
        assert got.gain > 0
        assert got.gain.isfinite()
        advance(optimizer, param, gradient(param))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_dry_run_at_zero_learning_rate_is_the_limit(lr):
    optimizer, param = build(LinearSGD)
    grad = gradient(param)
    advance(optimizer, param, grad)
    expected = predict(optimizer, param, grad)
    optimizer.param_groups[0]["lr"] = lr
    got = predict(optimizer, param, grad)
    assert got.lr is lr
    assert error(got.step, expected.step) < 1e-10  # PROBE_LR instead of LR: more rounding.
    torch.testing.assert_close(got.gain, expected.gain)


def test_dry_run_steps_half_precision_in_float32():
    """A bfloat16 parameter would swallow a small displacement whole."""
    optimizer, param = build(LinearSGD, torch.bfloat16, lr=1e-4)
    for _ in range(3):
        grad = gradient(param)
        memory = optimizer.state[param].get("memory", torch.zeros(())).float()
        got = predict(optimizer, param, grad)
        assert error(got.step, -2.5 * grad - memory) < 1e-2  # float32 rounding of param / lr
        advance(optimizer, param, grad)


def test_dry_run_of_an_optimizer_that_finds_its_own_rate():
    class Own(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                assert self.param_groups[0].get("lr") is None
                p.sub_(p.grad, alpha=0.5)

    param = nn.Parameter(torch.randn(SHAPE))
    for defaults in ({}, {"lr": None}):
        got = predict(Own([param], defaults), param, torch.ones(SHAPE))
        assert got.lr == 1.0
        torch.testing.assert_close(got.step, torch.full(SHAPE, -0.5))


def test_dry_run_reads_marks_and_leaves_attributes_alone():
    optimizer, param = build(lion)
    param.scale = 2.0
    grad = gradient(param)
    assert error(predict(optimizer, param, grad).step, really_step(optimizer, param, grad)) < 1e-12
    assert optimizer.history == []


@pytest.mark.parametrize("cls", [optim.SGD, ScaledAdam, lion], ids=["SGD", "ScaledAdam", "Lion"])
def test_hooks_do_not_run_and_scheduler_and_profiler_do_not_disturb(cls):
    calls = []
    optimizer, param = build(cls)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        optim.lr_scheduler.StepLR(optimizer, 1)  # Patches optimizer.step.
        grad = gradient(param)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            first = predict(optimizer, param, grad).step
        assert calls == []
        assert not getattr(optimizer, "_opt_called", False)
        assert torch.equal(first, predict(optimizer, param, grad).step)
        param.grad = grad
        optimizer.step()
        assert {"pre", "post", "global pre", "global post"} == set(calls)
    finally:
        for handle in handles:
            handle.remove()


def test_a_subclass_that_keeps_its_step_keeps_the_rule():
    # torch puts its wrapper around whichever class is instantiated first.
    for cls in (PlainAdam, optim.Adam):
        optimizer, param = build(cls)
        advance(optimizer, param, gradient(param))
        assert rule_for(cls) is rules._adam
        assert predict(optimizer, param, gradient(param)).gain.shape == SHAPE
    assert rule_for(ScaledAdam) is dry_run
    assert rule_for(ScaledInitAdam) is dry_run

    class Wrapped(optim.Adam):
        @functools.wraps(optim.Adam.step)
        def step(self, closure=None):
            raise AssertionError

    assert rule_for(Wrapped) is dry_run


def test_dry_run_gain_where_the_gradient_changes_nothing():
    """A sign that memory decides alone, against the gradient: little is owed to the gradient."""
    optimizer, param = build(lion)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    grad = gradient(param)
    optimizer.state[param]["mean"] = -100 * grad
    got = predict(optimizer, param, grad)
    assert error(got.step, grad.sign()) < TOLERANCE[torch.float64]
    expected = dry_runs.LEAST_COSINE * got.step.norm() / grad.norm()
    torch.testing.assert_close(got.gain, expected)


def test_a_patched_step_need_not_be_copyable():
    optimizer, param = build(LinearSGD)
    optimizer.step = functools.partial(optimizer.step, threading.Lock())
    check_supported(optimizer, param)
    assert predict(optimizer, param, gradient(param)).gain > 0


def test_dry_run_leaves_no_references():
    class Cyclic(LinearSGD):
        pass

    optimizer, param = build(Cyclic)
    optimizer.me, optimizer.groups = optimizer, optimizer.param_groups
    gc.collect()
    gc.disable()
    try:
        result = predict(optimizer, param, gradient(param))
        alive = [x for x in gc.get_objects() if type(x) is Cyclic]
        clones = [x for x in gc.get_objects() if type(x) is nn.Parameter and x is not param]
    finally:
        gc.enable()
    assert alive == [optimizer]
    assert not any(clone.shape == SHAPE for clone in clones)
    assert isinstance(result, Update)


def test_dry_run_does_not_copy_or_touch_other_parameters():
    big, param = nn.Parameter(torch.randn(1000)), nn.Parameter(torch.randn(SHAPE))
    optimizer = LinearSGD([{"params": [big], "factor": 9.0}, {"params": [param]}], lr=LR)
    optimizer.everything = {"all": [big, param]}
    big.grad = torch.ones(1000)
    before = big.detach().clone()
    predict(optimizer, param, torch.ones(SHAPE))
    probe, clone = dry_runs.probe_of(
        rules.OptimizerView(optimizer, optimizer.param_groups[1], {}, param, param),
        torch.ones(SHAPE),
        LR,
    )
    assert torch.equal(big, before)
    assert probe.everything["all"][1] is clone
    assert probe.everything["all"][0].numel() == 0


# --- what is not supported ------------------------------------------------------------------------


def test_check_supported_says_what_is_wrong():
    param, other = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))
    with pytest.raises(ValueError, match=r"does not hold head\.weight; pass the optimizer that"):
        check_supported(optim.SGD([other], lr=1.0), param, "head.weight")
    with pytest.raises(TypeError, match="LBFGS is not supported: its step needs a closure"):
        check_supported(optim.LBFGS([param]), param)
    with pytest.raises(TypeError, match="SparseAdam is not supported"):
        check_supported(optim.SparseAdam([param]), param)
    sparse = torch.zeros(2, 2).to_sparse()
    with pytest.raises(TypeError, match=r"head\.weight must be dense and real"):
        check_supported(optim.SGD([sparse], lr=1.0), sparse, "head.weight")
    twisted = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        check_supported(optim.SGD([twisted], lr=1.0), twisted)
    with pytest.raises(ValueError, match="dampening must be < 1"):
        check_supported(optim.SGD([param], lr=1.0, momentum=0.9, dampening=1.0), param)


def test_check_supported_refuses_what_a_dry_run_cannot_copy():
    optimizer, param = build(LinearSGD)
    optimizer.lock = threading.Lock()
    with pytest.raises(TypeError, match="LinearSGD cannot be copied for a dry run"):
        check_supported(optimizer, param)
    del optimizer.lock
    optimizer.inner = optim.SGD([param], lr=1.0)
    with pytest.raises(TypeError, match="LinearSGD wraps another optimizer"):
        check_supported(optimizer, param)


@by_case
def test_check_supported_accepts_every_known_class(cls, kw):
    optimizer, param = build(cls, **kw)
    check_supported(optimizer, param, "head.weight")
