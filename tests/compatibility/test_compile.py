"""torch.compile within real loops; the parts are in tests/test_capture.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import primum
from loops import ADAMW, SGD, assert_close, batch, gradients, make, report_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# torch.compile asks every tensor for its gradient, and hides that warning by hand.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.mark.parametrize(
    ("kind", "options"), [(optim.SGD, SGD), (optim.AdamW, ADAMW)], ids=["SGD", "AdamW"]
)
def test_same_training_as_without(kind: Any, options: Any) -> None:
    """Whole graphs, accumulation, clipping, a schedule, a smaller last batch (a new graph)."""
    (one, fast), (two, slow) = (make(kind, options, dtype=torch.float32) for _ in range(2))
    reducers = primum.attach(one, fast), primum.attach(two, slow)
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (fast, slow)]
    most = 0.0
    for number, rows in enumerate((24, 24, 10, 24)):
        for net, own, optimizer in ((compiled, one, fast), (two, two, slow)):
            optimizer.zero_grad()
            for part in range(2):
                inputs, labels = batch(2 * number + part, rows, dtype=torch.float32)
                (F.cross_entropy(net(inputs), labels) / 2).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.2)
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        found, expected = (report_of(each).extra_weights for each in reducers)
        assert found.shape == (rows,)
        # Float32 in another order, through twenty iterations of the solver.
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        most = max(most, float(expected.max()))
    assert most > 0.01
    assert report_of(reducers[0]).fallbacks == 0


class Recomputed(nn.Module):
    """Activation checkpointing around body and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return result


def test_activation_checkpointing() -> None:
    """The graph is made twice over; the weights are still found once and applied once."""
    model = Recomputed()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    twin = copy.deepcopy(model)
    inputs, labels = batch(0, 24, dtype=torch.float32)
    compiled = torch.compile(model, backend="aot_eager")
    F.cross_entropy(compiled(inputs), labels).backward()
    w = report_of(reducer).extra_weights
    assert w.max() > 0.01
    ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
    assert_close(gradients(model), gradients(twin), 2e-5)


def test_explicit_form_of_a_compiled_model() -> None:
    """The plain mean comes back and the hook weighs it: the same gradients, another value."""
    (one, fast), (two, slow) = (make(dtype=torch.float32) for _ in range(2))
    reducers = primum.attach(one, fast), primum.attach(two, slow)
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    for part in range(2):
        inputs, labels = batch(part, 24, dtype=torch.float32)
        losses = F.cross_entropy(compiled(inputs), labels, reduction="none") / 2
        loss = reducers[0](losses)
        assert torch.equal(loss, losses.mean())
        loss.backward()
        reducers[1](F.cross_entropy(two(inputs), labels, reduction="none") / 2).backward()
        found, expected = (report_of(each).extra_weights for each in reducers)
        assert expected.max() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert_close(gradients(one), gradients(two), 1e-4)


def test_gradients_for_another_purpose_are_plain() -> None:
    """As without torch.compile: adversarial examples, saliency, gradient penalties."""
    model, optimizer = make(dtype=torch.float32)
    reducer = primum.attach(model, optimizer)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    inputs, labels = batch(0, 24, dtype=torch.float32)
    inputs.requires_grad_()
    (found,) = torch.autograd.grad(F.cross_entropy(compiled(inputs), labels), inputs)
    (expected,) = torch.autograd.grad(F.cross_entropy(twin(inputs), labels), inputs)
    torch.testing.assert_close(found, expected)
    assert reducer.last is None
    F.cross_entropy(compiled(inputs), labels).backward()
    assert report_of(reducer).extra_weights.max() > 0.01
