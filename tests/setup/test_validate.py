"""What no step could be predicted for is refused by name, with a way out."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrizations

from primum.setup.validate import (
    check_head,
    check_model,
    check_order,
    grad_scaler,
    optimizers_in,
    optimizers_of,
    why_lost,
)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def stand_in(path: str, *bases: type, **members: Any) -> Any:
    """An object of a class that another package would have there."""
    module, _, name = path.rpartition(".")
    return type(name, bases, {"__module__": module, **members})()


def around(path: str, attribute: str, optimizer: object, *bases: type) -> Any:
    """A wrapper of that class around an optimizer."""
    wrapper = stand_in(path, *bases, __init__=lambda self: None)
    setattr(wrapper, attribute, optimizer)
    return wrapper


# --- models ---------------------------------------------------------------------------------------


def engine(**settings: Any) -> Any:
    """What `deepspeed.initialize` returns, as far as it is asked for its settings."""
    names = ("zero_optimization_stage", "bfloat16_enabled", "fp16_enabled")
    asked = {name: partial(settings.get, name, 0) for name in names}
    return stand_in("deepspeed.runtime.engine.DeepSpeedEngine", nn.Module, **asked)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", "FSDP1"),
        ("opacus.grad_sample.grad_sample_module.GradSampleModule", "differential privacy"),
    ],
)
def test_wrappers_are_refused_also_inside(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_model(nn.Sequential(stand_in(path, nn.Module)))


def test_a_model_inside_a_private_one_is_refused() -> None:
    model = network()
    check_model(model)
    model[0].weight.grad_sample = None
    with pytest.raises(ValueError, match="privacy would not hold"):
        check_model(model)


@pytest.mark.parametrize(
    "setting", [{"zero_optimization_stage": 2}, {"bfloat16_enabled": True}, {"fp16_enabled": True}]
)
def test_deepspeed(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"DeepSpeed's ZeRO and 16-bit .* use fully_shard"):
        check_model(engine(**setting))
    check_model(engine())


def test_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.DataParallel(network())
    check_model(model)
    monkeypatch.setattr(model, "device_ids", [0, 1])
    with pytest.raises(ValueError, match=r"on each of \[0, 1\].*use DistributedDataParallel"):
        check_model(model)


# --- heads ----------------------------------------------------------------------------------------


class Cosine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.normalize(x), self.weight, self.bias)


class Typed(nn.Linear):
    """With arguments of its own, so that its output is not judged."""

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return super().forward(x)


def flattened() -> nn.Linear:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(torch.zeros(32))
    return layer


def partitioned() -> nn.Linear:
    layer = nn.Linear(8, 4)
    layer.weight.ds_id = 7
    return layer


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "ZeRO 3": (partitioned, "partitioned by DeepSpeed's ZeRO stage 3"),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 4)),
        r"computed from other parameters.*use a plain nn\.Linear",
    ),
    "lazy": (lambda: nn.LazyLinear(4), "not initialized yet .*attach after"),
    "meta": (lambda: nn.Linear(8, 4, device="meta"), "not initialized yet .*attach after"),
    "flattened": (flattened, r"of shape \[32\].*flattened by sharding, or quantized"),
    "cosine": (lambda: Cosine(8, 4), r"Cosine whose output is not weight @ input \+ bias"),
    "frozen": (lambda: nn.Linear(8, 4).requires_grad_(False), "frozen.*modules_to_save"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_heads(kind: str) -> None:
    make, why = UNFIT[kind]
    with pytest.raises(ValueError, match=rf"out\.weight is .*{why}"):
        check_head(make(), "out")


def test_fit_heads() -> None:
    check_head(nn.Linear(8, 4), "out")
    check_head(Typed(8, 4), "out")


# --- optimizers -----------------------------------------------------------------------------------


class Outer(optim.Optimizer):
    """Shares groups and state with the optimizer that it wraps, as Opacus's and timm's do."""

    def __init__(self) -> None:
        self.param_groups, self.defaults, self.state = [], {}, defaultdict(dict)


@pytest.mark.parametrize("name", ["optimizer.DPOptimizer", "ddpoptimizer.DistributedDPOptimizer"])
def test_a_private_optimizer_is_refused_without_advice_to_unwrap_it(name: str) -> None:
    inner = sgd(network())
    wrapper = around(f"opacus.optimizers.{name}", "original_optimizer", inner, Outer)
    for given in (wrapper, [wrapper], around("any.Wrapper", "optimizer", wrapper)):
        with pytest.raises(TypeError, match="privacy would not hold") as caught:
            list(optimizers_in(given))
        assert "original_optimizer" not in str(caught.value)


@pytest.mark.parametrize("path", ["zero.stage3.DeepSpeedZeroOptimizer_Stage3", "b.BF16_Optimizer"])
def test_deepspeeds_optimizers(path: str) -> None:
    wrapper = around(f"deepspeed.runtime.{path}", "optimizer", sgd(network()))
    with pytest.raises(TypeError, match=r"deepspeed\.runtime\..*use fully_shard"):
        list(optimizers_in([wrapper]))


@pytest.mark.parametrize("attribute", ["_base_optimizer", "optimizer"])
def test_an_unknown_wrapper_is_not_advised_to_be_unwrapped(attribute: str) -> None:
    wrapper = around("timm.optim.lookahead.Lookahead", attribute, sgd(network()), Outer)
    with pytest.raises(TypeError, match=r"timm\.optim\.lookahead\.Lookahead wraps another") as said:
        list(optimizers_in(wrapper))
    assert f".{attribute}" not in str(said.value)


@pytest.mark.parametrize(
    ("path", "attribute", "bases"),
    [
        ("accelerate.optimizer.AcceleratedOptimizer", "optimizer", (Outer,)),
        ("lightning.pytorch.core.optimizer.LightningOptimizer", "optimizer", (Outer,)),
        ("fastai.optimizer.OptimWrapper", "opt", ()),
        ("some.loop.Wrapper", "optimizer", ()),
    ],
)
def test_what_is_safe_is_unwrapped(path: str, attribute: str, bases: tuple[type, ...]) -> None:
    inner = sgd(network())
    assert list(optimizers_in({"a": around(path, attribute, inner, *bases)})) == [inner]


@pytest.mark.parametrize(
    ("path", "way"),
    [("fastai.optimizer.Optimizer", "OptimWrapper"), ("keras.src.optimizers.sgd.SGD", "torch.opt")],
)
def test_what_is_no_optimizer_of_torch_is_named_in_full(path: str, way: str) -> None:
    with pytest.raises(TypeError, match=rf"got {path}\. Train with .*{way}"):
        list(optimizers_in(stand_in(path)))


def test_those_of_weight_and_bias() -> None:
    model = network()
    first, second = optim.SGD([model[2].weight], lr=0.1), optim.Adam([model[2].bias])
    assert optimizers_of([second, first], model[2], "2") == {"weight": first, "bias": second}
    assert optimizers_of([first], model[2], "2") == {"weight": first}
    model[2].bias.requires_grad_(False)
    assert optimizers_of([first, second], model[2], "2") == {"weight": first}
    with pytest.raises(ValueError, match=r"does not hold 2\.weight; pass the optimizer"):
        optimizers_of([second], model[2], "2")


def test_unfit_optimizers() -> None:
    model = network()
    with pytest.raises(TypeError, match=r"LBFGS is not supported"):
        optimizers_of([optim.LBFGS(model.parameters())], model[2], "2")
    with warnings.catch_warnings():  # it still uses the deprecated TorchScript
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    vars(zero).update(param_groups=[{"params": [model[2].weight]}], optim=sgd(model))
    assert list(optimizers_in(zero)) == [zero]
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer is not supported for 2"):
        optimizers_of([zero], model[2], "2")


class SecondOrder(optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad.grad_fn is None:
                    raise RuntimeError("gradients need a grad_fn; use create_graph=True")


def test_steps_that_differentiate_the_gradient() -> None:
    model = network()
    with pytest.raises(TypeError, match=r"its step differentiates the gradient"):
        check_order(SecondOrder(model.parameters()), model[2].weight)
    check_order(sgd(model), model[2].weight)


def test_scalers() -> None:
    scaler = torch.amp.GradScaler("cpu")
    holder = stand_in("timm.utils.NativeScaler")
    holder._scaler = scaler
    assert grad_scaler(scaler) is grad_scaler(holder) is scaler
    assert grad_scaler(None) is None
    assert grad_scaler(torch.amp.GradScaler("cpu", enabled=False)) is None


def test_why_the_weight_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert why_lost(network()).startswith("; call .remove() and attach again")
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    assert "DeepSpeed's ZeRO" in why_lost(network())
    monkeypatch.setattr("primum.setup.validate.fsdp_modules", lambda model: iter([model]))
    assert "fully_shard was called after attach" in why_lost(network())
