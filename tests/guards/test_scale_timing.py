"""The clipping factor does not depend on when a device delivers it, nor on discarded passes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, batch, make, make_like, pretend_device, report_of
from primum.guards.gradient_scale import MeasuredScale

LIMIT = 0.05  # far below the norm of the gradients here


def clipped(
    model: nn.Module, optimizer: optim.Optimizer, steps: int
) -> tuple[primum.Reducer, list[Tensor]]:
    """The Reducer of a loop that clips, and the extra weights of each step."""
    reducer = primum.attach(model, optimizer, recipe=primum.Primum(tolerance=0.0, max_iters=15))
    found = []
    for number in range(steps):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        assert report_of(reducer).why == ""
        found.append(report_of(reducer).extra_weights)
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    return reducer, found


@BOTH
def test_a_factor_that_the_host_never_reads_is_applied(
    kind: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(kind, options)
    twin, stepper = make_like(model, optimizer)
    _, on_host = clipped(twin, stepper, 4)
    pretend_device(monkeypatch)
    reducer, found = clipped(model, optimizer, 4)
    factor = reducer._scale.factor("weight")
    assert isinstance(factor, Tensor)
    assert factor.dim() == 0
    assert 0 < factor < 0.5
    for one, other in zip(found, on_host, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert max(float(each.max()) for each in found[1:]) > 0.01


@BOTH
def test_it_matters(kind: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: without the factor the weights are others."""
    model, optimizer = make(kind, options)
    twin, stepper = make_like(model, optimizer)
    _, with_factor = clipped(twin, stepper, 4)
    monkeypatch.setattr(MeasuredScale, "factor", lambda *_: 1.0)
    _, without = clipped(model, optimizer, 4)
    assert torch.equal(with_factor[0], without[0])  # nothing has been measured yet
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(with_factor, without, strict=True))


class TestDiscarded:
    """A backward pass whose gradients are zeroed in place says nothing of clipping."""

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
    @pytest.mark.parametrize("limit", [None, LIMIT])
    def test_zeroed_in_place(
        self,
        bias: bool,
        on_device: bool,
        limit: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        model, optimizer = make(optim.AdamW, ADAMW, bias=bias)
        reducer = primum.attach(model, optimizer)
        if on_device:
            pretend_device(monkeypatch)
        true = 1.0
        for number in range(4):
            inputs, labels = batch(number, 24)
            if number == 1:  # a pass for nothing, as for a metric
                other, classes = batch(50, 24)
                optimizer.zero_grad(set_to_none=False)
                F.cross_entropy(model(other), classes).backward()
            optimizer.zero_grad(set_to_none=False)
            with nullcontext_or_warns(number == 1):
                F.cross_entropy(model(inputs), labels).backward()
            if limit is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
                true = float(limit / norm)
            optimizer.step()
            assert float(reducer._scale.factor("weight")) == pytest.approx(true, rel=1e-5)
        assert report_of(reducer).discarded == 1


def nullcontext_or_warns(warns: bool) -> Any:
    match = "discarded before an optimizer"
    return pytest.warns(RuntimeWarning, match=match) if warns else nullcontext()
