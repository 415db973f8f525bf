"""Differential privacy promises that no gradient depends on other samples; weights break that.

Opacus is known by the modules of its classes, so the classes here only need the right ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

from .scene import assert_equal, batch, gradients, net, plain_gradients, sgd, warned

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class GradSampleModule(nn.Module):
    """As Opacus's: hooks on trained layers, per-sample gradients on their parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.hooks = []
        for layer in module.modules():
            if list(layer.parameters(recurse=False)):
                self.hooks.append(layer.register_forward_hook(self.capture_activations_hook))
                self.hooks.append(layer.register_full_backward_hook(self.capture_backprops_hook))
        for param in module.parameters():
            param.grad_sample = None

    def forward(self, *args: Any) -> Any:
        return self._module(*args)

    def capture_activations_hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        layer.activations = inputs[0].detach()

    def capture_backprops_hook(self, layer: nn.Module, _: Any, output: Any) -> None:
        (gradient,) = output
        weight: Any = layer.weight
        weight.grad_sample = torch.einsum("bo,bi->boi", gradient, layer.activations)


class DPOptimizer(optim.Optimizer):
    """As Opacus's: shares groups and state with the optimizer that it wraps."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.original_optimizer = optimizer
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> Any:
        return self.original_optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.original_optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)


class DistributedDPOptimizer(DPOptimizer):
    """One of its subclasses."""


GradSampleModule.__module__ = "opacus.grad_sample.grad_sample_module"
DPOptimizer.__module__ = "opacus.optimizers.optimizer"
DistributedDPOptimizer.__module__ = "opacus.optimizers.ddpoptimizer"

REFUSED = pytest.raises((TypeError, ValueError), match=r"(?i)privacy")


@pytest.mark.parametrize("kind", [DPOptimizer, DistributedDPOptimizer])
def test_a_private_optimizer_is_refused_without_advice_to_unwrap_it(
    kind: type[DPOptimizer],
) -> None:
    model = net()
    with REFUSED as caught:
        primum.attach(model, kind(sgd(model)))
    assert "original_optimizer" not in str(caught.value)


@pytest.mark.parametrize("passed", ["wrapper", "inside"])
def test_the_inner_optimizer_of_a_private_model_is_refused(passed: str) -> None:
    """Also if the model inside is passed: its parameters carry Opacus's hooks."""
    model = net()
    optimizer, wrapped = sgd(model), GradSampleModule(model)
    with REFUSED:
        primum.attach(wrapped if passed == "wrapper" else model, optimizer)


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    inputs, labels = batch(number, 16)
    return F.cross_entropy(model(inputs), labels)


def test_a_private_model_trains_here_as_it_does_in_opacus() -> None:
    """Guards the tests above and below: the classes do what their names say."""
    wrapped = GradSampleModule(net())
    loss_of(wrapped).backward()
    weight = wrapped._module.head.weight
    torch.testing.assert_close(weight.grad_sample.sum(0), weight.grad)


def test_a_model_that_becomes_private_after_attach_gets_plain_gradients() -> None:
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer)
    wrapped, private = GradSampleModule(model), DPOptimizer(optimizer)
    with warned() as messages:
        for number in range(3):
            twin = net()
            twin.load_state_dict(model.state_dict())
            expected = plain_gradients(twin, lambda plain, n=number: loss_of(plain, n))
            private.zero_grad()
            loss_of(wrapped, number).backward()
            assert_equal(gradients(model), expected)
            private.step()
    assert len(messages) == 1
    assert "privacy" in messages[0].lower()


def test_no_advice_to_unwrap_a_wrapper_that_is_not_known() -> None:
    """What it adds to the inner one's step may be what makes a promise hold."""

    class Wrapper(optim.Optimizer):
        def __init__(self, optimizer: optim.Optimizer) -> None:
            self.inner, self.state = optimizer, optimizer.state
            self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    model = net()
    with pytest.raises(TypeError) as caught:
        primum.attach(model, Wrapper(sgd(model)))
    assert "pass the inner one" not in str(caught.value)
