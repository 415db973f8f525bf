"""Gradients of gradients, the explicit form's accounts, and other corners of real loops."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from loops import batch, make, report_of
from primum.guards.steps import IDLE_STEPS


def squared_gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient of the squared norm of the gradient, as a gradient penalty or MAML takes it."""
    params = list(model.parameters())
    first = torch.autograd.grad(F.cross_entropy(model(inputs), labels), params, create_graph=True)
    total = torch.stack([each.square().sum() for each in first]).sum()
    return list(torch.autograd.grad(total, params))


class TestSecondOrder:
    def test_radius_zero_is_plain(self) -> None:
        model, optimizer = make()
        inputs, labels = batch(0, 24)
        expected = squared_gradient(model, inputs, labels)
        primum.attach(model, optimizer, radius=0)
        for found, plain in zip(squared_gradient(model, inputs, labels), expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_as_of_the_weighted_loss(self, dtype: torch.dtype) -> None:
        """The weights themselves are constants: they are not differentiated."""
        model, optimizer = make(dtype=dtype)
        inputs, labels = batch(0, 24, dtype=dtype)
        twin = copy.deepcopy(model)
        reducer = primum.attach(model, optimizer)
        found = squared_gradient(model, inputs, labels)
        weights = 1 + report_of(reducer).extra_weights
        assert weights.max() > 1.01
        params = list(twin.parameters())
        losses = F.cross_entropy(twin(inputs), labels, reduction="none")
        first = torch.autograd.grad((weights * losses).mean(), params, create_graph=True)
        total = torch.stack([each.square().sum() for each in first]).sum()
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        for own, expected in zip(found, torch.autograd.grad(total, params), strict=True):
            torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)


class TestExplicit:
    def test_a_discarded_pass_is_counted_and_does_not_disturb_the_factor(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            inputs, labels = batch(number, 24)
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            reducer(losses).backward()
            optimizer.zero_grad()
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reducer(losses).backward()
            assert len(caught) == (1 if number == 0 else 0)
            optimizer.step()
            optimizer.zero_grad()
            assert reducer._scale.factor("weight") == 1
        assert reducer._engine.discarded.value == 3

    def test_two_losses_before_one_backward_are_one_step(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            total = torch.zeros((), dtype=torch.float64)
            for part in range(2):
                inputs, labels = batch(2 * number + part, 24)
                losses = F.cross_entropy(model(inputs), labels, reduction="none")
                total = total + reducer(losses / 2)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert reducer._engine.discarded.value == 0
        assert reducer._scale.factor("weight") == 1


class OwnCopy(nn.Sequential):
    """Copies its `__dict__` itself, as some user classes do."""

    def __deepcopy__(self, memo: dict[int, object]) -> OwnCopy:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


def test_a_copy_that_copies_itself_saves_its_own_weights() -> None:
    model = OwnCopy(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    primum.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin[2].weight)
    loaded = pickle.loads(pickle.dumps(twin))
    assert not loaded[2].weight.any()
    assert model[2].weight.any()


class TestIdle:
    def test_several_optimizers_that_step_in_turn(self) -> None:
        """More of them than idle steps are allowed; warnings are errors here."""
        model, _ = make()
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        assert len(optimizers) > IDLE_STEPS
        optimizers = [torch.optim.SGD(model[2].parameters(), lr=0.1), *optimizers[:-2]]
        reducer = primum.attach(model, optimizers)
        for number in range(3):
            inputs, labels = batch(number, 24)
            F.cross_entropy(model(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert report_of(reducer).applied

    def test_a_phase_that_trains_something_else(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for _ in range(2 * IDLE_STEPS):
            optimizer.zero_grad()
            model[:2](inputs).square().mean().backward()
            optimizer.step()
        assert report_of(reducer).applied


class Cosine(nn.Linear):
    """A classifier on angles: not an affine function of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Named(nn.Linear):
    """An affine layer whose input has another name."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class TestSubclasses:
    def test_a_head_that_is_not_affine_is_refused(self) -> None:
        model = nn.Sequential(nn.Tanh(), Cosine(8, 3, bias=False))
        with pytest.raises(ValueError, match=r"Cosine whose output is not weight @ input \+ bias"):
            primum.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def test_an_input_of_another_name(self) -> None:
        head = Named(4, 3)
        reducer = primum.attach(head, torch.optim.SGD(head.parameters(), lr=0.1))
        F.cross_entropy(head(hidden=torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        assert report_of(reducer).applied


def test_a_loaded_state_is_not_rolled_back() -> None:
    model, optimizer = make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    reducer = primum.attach(model, optimizer, recipe="paper", scaler=scaler)
    states = []
    for number in range(4):
        inputs, labels = batch(number, 24, dtype=torch.float32)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        if number == 3:  # skipped
            model[2].weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        states.append(reducer.state_dict())
    reducer.load_state_dict(states[1])
    assert reducer.state_dict()["recipe_state"]["calls"] == 2
