"""A backward pass through the head that trains another network: GANs, actor-critic, adversarial
examples. It can be left alone, and if it is not, that is noticed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import primum
from clients.networks import CLEARS, PAIRS, ActorCritic, gan, plain_gradients
from loops import batch, gradients, make, report_of, stir, train

both_pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
every_clear = pytest.mark.parametrize("clear", CLEARS)
both_optimizers = pytest.mark.parametrize("kind", ["SGD", "Adam"])


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


class TestPaused:
    @both_pairs
    @both_optimizers
    @every_clear
    def test_the_other_network_gets_plain_gradients(self, pair, kind: str, clear: str) -> None:
        """Bit for bit; no warning; and the head's own passes are weighed as before."""
        made: ActorCritic = pair(kind, clear)
        reducer = made.attach()
        most = 0.0
        for number in range(6):
            made.update_judge(number)
            most = max(most, float(report_of(reducer).extra_weights.max()))
            expected = plain_gradients(made, number)
            made.update_player(number, paused=True)
            assert equal(gradients(made.player), expected)
        assert most > 0.01
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0
        assert report_of(reducer).discarded == 0

    @both_pairs
    def test_without_it_the_gradients_are_others(self, pair) -> None:
        """What the block is for: otherwise this file would test nothing."""
        made: ActorCritic = pair()
        made.attach()
        bent = []
        for number in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # said of the last player's update
                made.update_judge(number)
                expected = plain_gradients(made, number)
                made.update_player(number, paused=False)
            bent.append(not equal(gradients(made.player), expected))
        assert any(bent)

    def test_what_counts_is_the_backward_pass(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        twin = copy.deepcopy(model)
        inputs, labels = batch(2, 24)
        F.cross_entropy(twin(inputs), labels).backward()
        for inside in (True, False):
            optimizer.zero_grad()
            if inside:
                loss = F.cross_entropy(model(inputs), labels)
                with reducer.paused():
                    loss.backward()
            else:
                with reducer.paused():
                    loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
            assert equal(gradients(model), gradients(twin)) == inside

    def test_ends_with_the_block_also_after_an_error(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        with pytest.raises(ZeroDivisionError), reducer.paused():
            raise ZeroDivisionError
        train(model, optimizer, 1)
        assert report_of(reducer).applied

    def test_nested(self) -> None:
        """The inner block ends; the outer one goes on."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        with reducer.paused():
            with reducer.paused():
                train(model, optimizer, 1)
            train(model, optimizer, 1)
        assert reducer.last is None
        train(model, optimizer, 1)
        assert report_of(reducer).applied

    def test_a_disabled_reducer_stays_disabled(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        reducer.enabled = False
        with reducer.paused():
            train(model, optimizer, 1)
        train(model, optimizer, 1)
        assert reducer.last is None

    def test_discarded_gradients_of_a_paused_pass_are_expected(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        for number in range(3):
            with reducer.paused():
                F.cross_entropy(model(inputs), labels).backward()
            train(model, optimizer, 1, first=number)
        assert report_of(reducer).discarded == 0


class TestNoticed:
    """A weighed pass whose gradients are discarded without a step."""

    @both_pairs
    @both_optimizers
    @every_clear
    def test_once_and_counted(self, pair, kind: str, clear: str) -> None:
        made: ActorCritic = pair(kind, clear)
        reducer = made.attach()
        with pytest.warns(RuntimeWarning, match="paused") as caught:
            made.train(4)
        assert len(caught) == 1
        assert report_of(reducer).discarded == 3  # of the fourth, nothing is known yet
        made.update_judge(4)
        assert report_of(reducer).discarded == 4
        assert report_of(reducer).fallbacks == 0

    def test_at_the_next_weighed_pass(self) -> None:
        made = gan()
        reducer = made.attach()
        made.update_judge(0)
        made.update_player(0, paused=False)
        assert report_of(reducer).discarded == 0
        with pytest.warns(RuntimeWarning, match="paused"):
            made.update_judge(1)
        assert report_of(reducer).discarded == 1

    def test_every_pass_counts(self) -> None:
        """Two passes accumulated, and both discarded."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(2):
            inputs, labels = batch(number, 24)
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.zero_grad()
        with pytest.warns(RuntimeWarning, match="paused"):
            train(model, optimizer, 2)
        assert report_of(reducer).discarded == 2

    def test_adversarial_examples_by_backward(self) -> None:
        """`loss.backward()` for the gradient of the input, as in the fast gradient sign method."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        inputs, labels = batch(7, 24)
        twin = copy.deepcopy(model)
        found = []
        for net in (twin, model):
            nudged = inputs.clone().requires_grad_()
            loss = F.cross_entropy(net(nudged), labels)
            with reducer.paused():
                loss.backward()
            found.append(nudged.grad)
        assert torch.equal(found[0], found[1])
        train(model, optimizer, 1)
        assert report_of(reducer).discarded == 0
        nudged = inputs.clone().requires_grad_()
        F.cross_entropy(model(nudged), labels).backward()
        with pytest.warns(RuntimeWarning, match="paused"):
            train(model, optimizer, 1)  # begins with zero_grad
        assert report_of(reducer).discarded == 1

    def test_an_observer_bends_nothing(self) -> None:
        """Nothing to warn about: here warnings are errors."""
        made = gan()
        primum.observe(made.judge, made.judge_optimizer)
        made.train(4)

    def test_it_does_not_stop(self) -> None:
        """The passes of the head itself go on being weighed after the warning."""
        made = gan()
        reducer = made.attach()
        with pytest.warns(RuntimeWarning, match="paused"):
            made.train(3)
        stir(made.judge_optimizer)
        twin = copy.deepcopy(made.judge)
        made.clear(made.judge_optimizer)
        made.judge_loss(made.judge, 5).backward()
        twin.zero_grad()
        made.judge_loss(twin, 5).backward()
        assert report_of(reducer).applied
        assert not equal(gradients(made.judge), gradients(twin))


def test_a_module_may_clear_its_own_gradients() -> None:
    """`net.zero_grad()`, as DCGAN calls it, discards them as the optimizer does."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad()
    with pytest.warns(RuntimeWarning, match="paused"):
        F.cross_entropy(model(inputs), labels).backward()
    assert report_of(reducer).discarded == 1
