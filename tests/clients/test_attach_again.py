"""Attaching again replaces what is attached; `primum.detach` removes it, whoever attached it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, assert_close, batch, gradients, make, report_of, stir, train
from primum import Reducer

attach_or_observe = pytest.mark.parametrize("attach", [primum.attach, primum.observe])


def weighed_once(model: nn.Module, optimizer: optim.Optimizer, reducer: Reducer) -> None:
    """The gradients are those of the weighted loss on a copy, and the weights matter."""
    stir(optimizer)
    inputs, labels = batch(9, 24)
    twin = copy.deepcopy(model)
    for net in (model, twin):
        net.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    w = report_of(reducer).extra_weights
    assert w.max() > 0.01
    ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
    assert_close(gradients(model), gradients(twin), 1e-12)
    optimizer.step()
    optimizer.zero_grad()


def plain(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """The gradients are those of a copy, bit for bit."""
    stir(optimizer)
    inputs, labels = batch(9, 24)
    twin = copy.deepcopy(model)
    for net in (model, twin):
        net.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
    assert all(map(torch.equal, gradients(model), gradients(twin)))


class TestAgain:
    def test_a_notebook_cell_run_twice(self) -> None:
        """The line of the README, which keeps nothing of what `attach` returns."""
        model, optimizer = make()
        old = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        for _ in range(3):
            primum.attach(model, optimizer)
            train(model, optimizer, 2)
        assert old.last is None
        new = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        weighed_once(model, optimizer, new)
        assert report_of(new).fallbacks == 0

    def test_a_second_phase_with_an_optimizer_of_its_own(self) -> None:
        """Backbone frozen, then unfrozen, as in fine-tuning: no warning in either phase."""
        model, _ = make()
        model[0].requires_grad_(False)
        optimizer: optim.Optimizer = optim.SGD(model[2].parameters(), **SGD)
        old = primum.attach(model, optimizer)
        train(model, optimizer, 4)
        assert report_of(old).applied
        model[0].requires_grad_(True)
        optimizer = optim.AdamW(model.parameters(), **ADAMW)
        new = primum.attach(model, optimizer)
        train(model, optimizer, 6)
        assert old.last is None
        assert new.optimizer is optimizer
        assert report_of(new).fallbacks == 0
        weighed_once(model, optimizer, new)

    def test_the_old_one_does_not_take_the_new_one_along(self) -> None:
        model, optimizer = make()
        with primum.attach(model, optimizer) as old:
            new = primum.attach(model, optimizer)
        old.remove()
        train(model, optimizer, 1)
        weighed_once(model, optimizer, new)

    def test_its_step_hook_goes_with_it(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        hooks = len(optimizer._optimizer_step_post_hooks)
        for _ in range(5):
            primum.attach(model, optimizer)
        assert len(optimizer._optimizer_step_post_hooks) == hooks

    def test_other_settings(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        train(model, optimizer, 1)
        primum.attach(model, optimizer, radius=0.0)
        plain(model, optimizer)

    def test_observed_and_attached_replace_each_other(self) -> None:
        model, optimizer = make()
        attached = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        watcher = primum.observe(model, optimizer)
        assert attached.last is None
        plain(model, optimizer)
        assert not report_of(watcher).applied
        attached = primum.attach(model, optimizer)
        assert watcher.last is None
        weighed_once(model, optimizer, attached)

    def test_another_head_is_another_matter(self) -> None:
        model = TwoHeads().double()
        optimizer = optim.SGD(model.parameters(), **SGD)
        reducers = [primum.attach(model, optimizer, head=name) for name in ("actor", "critic")]
        assert all("attached" in repr(each) for each in reducers)

    def test_a_refused_attachment_leaves_the_old_one(self) -> None:
        model, optimizer = make()
        old = primum.attach(model, optimizer)
        with pytest.raises(ValueError, match="radius"):
            primum.attach(model, optimizer, radius=-1.0)
        with pytest.raises(ValueError, match="optimizer"):
            primum.attach(model, optim.SGD(model[0].parameters(), **SGD))
        train(model, optimizer, 1)
        weighed_once(model, optimizer, old)


class TwoHeads(nn.Module):
    """Policy and value on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).tanh()
        return self.actor(features), self.critic(features).squeeze(1)

    def loss(self, number: int) -> Tensor:
        inputs, labels = batch(number, 24)
        logits, values = self(inputs)
        return F.cross_entropy(logits, labels) + F.mse_loss(values, labels.double())


class TestDetach:
    @attach_or_observe
    def test_whatever_is_attached(self, attach: Callable[..., Reducer]) -> None:
        model, optimizer = make()
        reducer = attach(model, optimizer)
        train(model, optimizer, 2)
        primum.detach(model)
        assert reducer.last is None
        plain(model, optimizer)
        assert not model[2]._forward_hooks
        assert not optimizer._optimizer_step_post_hooks

    def test_nothing_attached(self) -> None:
        model, optimizer = make()
        primum.detach(model)
        primum.attach(model, optimizer)
        primum.detach(model)
        primum.detach(model)
        plain(model, optimizer)
        primum.detach(nn.ReLU())

    def test_several_heads(self) -> None:
        model = TwoHeads().double()
        optimizer = optim.SGD(model.parameters(), **SGD)
        reducers = [primum.attach(model, optimizer, head=name) for name in ("actor", "critic")]
        primum.detach(model)
        assert all("removed" in repr(each) for each in reducers)
        stir(optimizer)
        twin = copy.deepcopy(model)
        for net in (model, twin):
            net.zero_grad()
            net.loss(5).backward()
        assert all(map(torch.equal, gradients(model), gradients(twin)))

    @pytest.mark.parametrize("attached_to", ["inside", "wrapper"])
    def test_through_a_wrapper(self, attached_to: str) -> None:
        """Attached to the model or to what wraps it, detached by way of the other."""
        model, optimizer = make()
        wrapper = nn.Sequential(model)
        ends = {"inside": model, "wrapper": wrapper}
        primum.attach(ends.pop(attached_to), optimizer)
        train(model, optimizer, 1)
        primum.detach(*ends.values())
        plain(model, optimizer)

    def test_and_attached_again(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        primum.detach(model)
        train(model, optimizer, 3)
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        weighed_once(model, optimizer, reducer)
        assert report_of(reducer).fallbacks == 0

    def test_other_hooks_stay(self) -> None:
        model, optimizer = make()
        called = []
        model[2].register_forward_hook(lambda *_: called.append(1))
        primum.attach(model, optimizer)
        primum.detach(model)
        model(batch(0, 4)[0])
        assert called == [1]
