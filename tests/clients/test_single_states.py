"""One sample at a time, as REINFORCE calls its policy: nothing to trade off, so gradients are
plain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, SGD, batch, gradients, make, report_of, stir, train

ONE_SAMPLE = "a batch of one sample has nothing to trade off and keeps its plain gradient"


@BOTH
@pytest.mark.parametrize("shape", ["[d]", "[1, d]", "[1, T, d]"])
def test_plain_and_no_fallback(kind: Any, options: Any, shape: str) -> None:
    """Warnings are errors: the last batch of an epoch is often alone."""
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer, per="sample")

    def loss(net: nn.Module, number: int) -> Tensor:
        inputs, labels = batch(number, 1, 5) if "T" in shape else batch(number, 1)
        if shape == "[d]":
            return F.cross_entropy(net(inputs[0]), labels[0])
        return F.cross_entropy(net(inputs).movedim(-1, 1), labels)

    for number in range(6):
        optimizer.zero_grad()
        stir(optimizer)
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss(twin, number).backward()
        loss(model, number).backward()
        assert all(map(torch.equal, gradients(model), gradients(twin)))
        report = report_of(reducer)
        assert not report.applied
        assert report.reason == ONE_SAMPLE
        assert report.fallbacks == 0
        optimizer.step()
    assert torch.equal(report.extra_weights, torch.zeros(1, dtype=torch.float64))


def test_tokens_of_one_sequence_are_many_samples() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, per="token")
    for number in range(3):
        inputs, labels = batch(number, 1, 12)
        optimizer.zero_grad()
        stir(optimizer)
        F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
        optimizer.step()
    assert report_of(reducer).applied
    assert report_of(reducer).extra_weights.max() > 0.01


def test_one_token_alone() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, per="token")
    inputs, labels = batch(0, 1, 1)
    F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
    assert report_of(reducer).reason == ONE_SAMPLE.replace("sample", "token")


def test_the_last_batch_of_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """49 samples in batches of 24: the last one is alone. Its step is plain, the others are not."""
    caplog.set_level("INFO", "primum")
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    for number in range(3):
        for rows in (24, 24, 1):
            train(model, optimizer, 1, first=number, rows=rows)
            assert report_of(reducer).applied == (rows > 1)
    assert report_of(reducer).fallbacks == 0
    assert ONE_SAMPLE in caplog.text


def test_explicit_form() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 1)
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    assert torch.equal(reducer(losses), losses.mean())
    assert not report_of(reducer).applied
    assert report_of(reducer).fallbacks == 0


@pytest.mark.parametrize(
    ("kind", "options"), [(optim.SGD, SGD), (optim.Adam, {"lr": 0.01}), (optim.AdamW, ADAMW)]
)
def test_reinforce(kind: Any, options: Any) -> None:
    """The policy sees one state at a time; one backward pass per episode, through all calls.

    The whole run is that of plain training, bit for bit.
    """

    def run(attached: bool) -> tuple[nn.Module, primum.Reducer | None]:
        policy, optimizer = make(kind, options)
        reducer = primum.attach(policy, optimizer) if attached else None
        rng = torch.Generator().manual_seed(0)
        for episode in range(4):
            states, actions = batch(episode, 5 + episode)
            rewards = torch.randn(len(states), generator=rng, dtype=torch.float64)
            returns = rewards.flip(0).cumsum(0).flip(0)
            log_probs = [
                policy(state).log_softmax(-1)[action]
                for state, action in zip(states, actions, strict=True)
            ]
            optimizer.zero_grad()
            (-torch.stack(log_probs) * returns).sum().backward()
            optimizer.step()
        return policy, reducer

    plain, _ = run(False)
    found, reducer = run(True)
    assert all(map(torch.equal, found.parameters(), plain.parameters()))
    assert reducer is not None
    assert report_of(reducer).fallbacks == 0
    assert not report_of(reducer).applied
