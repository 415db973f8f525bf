"""Whatever breaks inside a hook of ours: the user's pass and step go on with plain gradients."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import SGD, batch, gradients, make, make_like, pretend_device, report_of
from primum.distributed.scope import Scope
from primum.guards.steps import StepWatch
from primum.guards.watchers import Stopwatch
from primum.hooks import head_hook, private
from primum.hooks.head_hook import HeadCall
from primum.kernel.engine import Engine, Observer

BROKEN = "fell back to plain gradients: ZeroDivisionError: broken"


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("broken")


def run(model: nn.Module, optimizer: optim.Optimizer, number: int) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    inputs, labels = batch(number, 24, dtype=dtype)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    found = gradients(model)
    optimizer.step()
    return found


PARTS: dict[str, tuple[Any, str]] = {
    "the record of a forward pass": (HeadCall, "__init__"),
    "which ranks there are": (Scope, "peers"),
    "whether the pass trains the head": (HeadCall, "trains_head"),
    "an arrival": (Engine, "arrived"),
    "the head's input let go": (HeadCall, "release"),
    "the head's input": (HeadCall, "inputs"),
    "gradients handed on": (Engine, "handed_on"),
    "the number of the backward pass": (head_hook, "backward_id"),
}


@pytest.mark.parametrize(("owner", "name"), PARTS.values(), ids=PARTS)
def test_an_error_leaves_plain_gradients(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    twin, stepper = make_like(model, optimizer)
    monkeypatch.setattr(owner, name, broken)
    reducer = primum.attach(model, optimizer)
    with pytest.warns(RuntimeWarning, match=BROKEN) as caught:
        found = [run(model, optimizer, 0)]
    assert len(caught) == 1
    assert caught[0].filename.endswith((__file__, "loops.py"))
    found += [run(model, optimizer, number) for number in range(1, 5)]
    report = report_of(reducer)
    assert not report.applied
    assert report.reason == "ZeroDivisionError: broken"
    assert report.fallbacks == len(found)
    assert report.as_dict()["applied"] == 0
    for number, plain in enumerate(found):
        for one, other in zip(plain, run(twin, stepper, number), strict=True):
            assert torch.equal(one, other)
    monkeypatch.undo()
    reducer = primum.attach(model, optimizer)
    run(model, optimizer, 7)
    run(model, optimizer, 8)
    assert report_of(reducer).applied


def test_an_input_that_does_not_come_first() -> None:
    class Masked(nn.Linear):
        def forward(self, mask: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden)

    model = nn.ModuleDict({"body": nn.Linear(6, 8), "head": Masked(8, 4)})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    reducer = primum.attach(model, optimizer, head="head")
    hidden = model["body"](torch.randn(24, 6))
    with pytest.warns(RuntimeWarning, match="first argument has 3 features, not 8; pass"):
        model["head"](torch.ones(24, 3), hidden).square().sum().backward()
    assert report_of(reducer).fallbacks == 1


def test_an_error_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model, optimizer = make(dtype=torch.float32)
    twin, stepper = make_like(model, optimizer)
    monkeypatch.setattr(Scope, "peers", broken)
    reducer = primum.attach(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match=BROKEN):
        found = run(compiled, optimizer, 0)
    run(compiled, optimizer, 1)
    assert report_of(reducer).fallbacks == 2
    for one, other in zip(found, run(twin, stepper, 0), strict=True):
        torch.testing.assert_close(one, other)


def test_a_guard_that_fails_costs_no_weights() -> None:
    class Failing(Observer):
        on_arrival = broken

    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    reducer._engine.observers.append(Failing())
    with pytest.warns(RuntimeWarning, match="Failing failed: ZeroDivisionError: broken"):
        run(model, optimizer, 0)
    run(model, optimizer, 1)  # warned once: a second warning would be an error here
    assert report_of(reducer).applied
    assert report_of(reducer).fallbacks == 0


@pytest.mark.parametrize(("owner", "name"), [(StepWatch, "after"), (Stopwatch, "after_step")])
def test_an_error_after_a_step(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made, and the next ones as well."""
    monkeypatch.setattr(owner, name, broken)
    model, optimizer = make()
    primum.attach(model, optimizer)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(RuntimeWarning, match="not track the steps .*ZeroDivisionError") as caught:
        run(model, optimizer, 0)
    assert len(caught) == 1
    assert stepped == [1]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    run(model, optimizer, 1)  # warned once: a second warning would be an error here
    assert stepped == [1, 1]


def test_a_warning_that_the_user_makes_an_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    monkeypatch.setattr(HeadCall, "trains_head", broken)
    inputs, labels = batch(0, 24)
    with pytest.raises(RuntimeWarning, match=BROKEN):  # warnings are errors here
        F.cross_entropy(model(inputs), labels).backward()


def test_an_error_of_the_process_group_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait: to go on would leave them waiting."""
    model, optimizer = make()
    monkeypatch.setattr(Scope, "peers", broken)
    reducer = primum.attach(model, optimizer)
    monkeypatch.setattr(reducer._engine.builder, "broken", True)
    with pytest.raises(ZeroDivisionError):
        model(batch(0, 24)[0])


def test_without_the_question_which_nodes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass counts as training then, which is said once; `paused()` keeps one out."""
    model, optimizer = make()
    twin, stepper = make_like(model, optimizer)
    reducer, other = primum.attach(model, optimizer), primum.attach(twin, stepper)
    expected = [run(twin, stepper, number) for number in range(3)]
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    private.private.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="_will_engine_execute_node") as caught:
            found = [run(model, optimizer, number) for number in range(3)]
    finally:
        private.private.cache_clear()
    assert len(caught) == 1
    assert report_of(reducer).fallbacks == report_of(other).fallbacks == 0
    for one, two in zip(chain(*found), chain(*expected), strict=True):
        assert torch.equal(one, two)


class TestNotFinite:
    """Values that are not finite: no weights, a reason, counted once."""

    @pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
    @pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
    def test_reported(self, kind: Any, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = make(kind, SGD if kind is optim.SGD else {"lr": 0.01})
        reducer = primum.attach(model, optimizer)
        if on_device:
            pretend_device(monkeypatch)
        run(model, optimizer, 0)
        assert report_of(reducer).applied
        inputs, labels = batch(1, 24)
        inputs[3] = torch.inf
        optimizer.zero_grad()
        with pytest.warns(RuntimeWarning, match="step's values were not finite") as caught:
            F.cross_entropy(model(inputs), labels).backward()
        assert len(caught) == 1
        report = report_of(reducer)
        assert not report.applied
        assert report.reason == "the step's values were not finite"
        assert report.fallbacks == 1
        figures = report.as_dict()
        assert figures["applied"] == 0
        assert figures["fallbacks"] == 1
        assert torch.equal(report.extra_weights, torch.zeros(24, dtype=torch.float64))

    @pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
    def test_with_a_scaler_it_is_expected_and_not_counted(
        self, on_device: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = make(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        reducer = primum.attach(model, optimizer, scaler=scaler)
        if on_device:
            pretend_device(monkeypatch)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        scaler.scale(1e10 * F.cross_entropy(model(inputs), labels)).backward()
        scaler.step(optimizer)
        report = report_of(reducer)
        assert not report.applied
        assert report.reason == "the step's values were not finite"
        assert report.fallbacks == 0
        assert report.as_dict()["applied"] == 0
