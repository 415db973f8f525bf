"""A weight that head and embedding share: only clipping is measured as clipping."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, SGD, report_of


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose embedding matters."""

    def __init__(self, *, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 12, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.mix(self.embedding(tokens)).tanh())
        return logits


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(12, (6, 5), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def measured(reducer: primum.Reducer) -> Any:
    return reducer._scale.factor("weight")


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_share_of_the_embedding_is_no_clipping(
    kind: Any, options: Any, bias: bool, parts: int
) -> None:
    model = Tied(bias=bias)
    optimizer = kind(model.parameters(), **options)
    reducer = primum.attach(model, optimizer)
    for number in range(6):
        optimizer.zero_grad()
        for part in range(parts):
            loss_of(model, 10 * number + part).backward()
        optimizer.step()
        assert measured(reducer) == 1


@BOTH
@pytest.mark.parametrize("parts", [1, 2])
def test_clipping_is_measured_on_the_whole_gradient(kind: Any, options: Any, parts: int) -> None:
    model = Tied()
    optimizer = kind(model.parameters(), **options)
    reducer = primum.attach(model, optimizer)
    for number in range(5):
        optimizer.zero_grad()
        for part in range(parts):
            loss_of(model, 10 * number + part).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.1
        optimizer.step()
        assert measured(reducer) == pytest.approx(0.05 / float(norm), rel=1e-4)


def test_loss_scaling_is_removed() -> None:
    model = Tied().float()
    optimizer = optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    reducer = primum.attach(model, optimizer, scaler=scaler)
    for number in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        assert measured(reducer) == pytest.approx(0.05 / float(norm), rel=1e-3)


def test_passes_that_stay_plain_are_measured_as_well() -> None:
    """What was accumulated is known, whatever was done to it on the way."""
    model = Tied()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    with reducer.paused():
        loss_of(model, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    assert measured(reducer) == pytest.approx(0.05 / float(norm), rel=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_weights_are_those_of_the_heads_share(compiled: bool) -> None:
    """The approximation: the same weights as with an embedding of its own."""
    reports = []
    for tied in (True, False):
        model = Tied(tied=tied)
        model.lm_head.load_state_dict(Tied().lm_head.state_dict())
        model.embedding.load_state_dict(Tied().embedding.state_dict())
        optimizer = optim.AdamW(model.parameters(), **ADAMW)
        reducer = primum.attach(model, optimizer)
        net = torch.compile(model, backend="aot_eager") if compiled else model
        loss_of(net, 0).backward()
        reports.append(report_of(reducer))
    assert reports[0].per == "token"
    torch.testing.assert_close(reports[0].extra_weights, reports[1].extra_weights)


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        model = Tied()
        optimizer = optim.SGD(model.parameters(), **SGD)
        reducer = primum.attach(model, optimizer)
        loss_of(model, 0).backward()
        optimizer.step()
        refs = [weakref.ref(each) for each in (model, optimizer, reducer)]
        del model, optimizer, reducer
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_an_error_leaves_the_pass_alone() -> None:
    class Broken:
        def scale(self, loss: Tensor) -> Tensor:
            raise ZeroDivisionError("broken")

    model = Tied()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer, scaler=Broken())
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: broken"):
        loss_of(model, 0).backward()
    optimizer.step()
    assert report_of(reducer).fallbacks == 1
    assert measured(reducer) == 1
