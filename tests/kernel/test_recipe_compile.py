"""`compile=True`: the same weights, one graph, and nothing lost where there is no compiler."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch._dynamo.testing import CompileCounterWithBackend

import primum
from loops import ADAMW, BOTH, SGD, batch, make, make_like, report_of
from primum.kernel.recipe import Primum

MOST = 4  # iterations: quick to trace


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts compilations, by a backend that needs no C++ compiler."""
    torch._dynamo.reset()
    made = CompileCounterWithBackend("aot_eager")
    real = torch.compile

    def compile(function: Any, **options: Any) -> Any:
        return real(function, backend=made, **options)

    monkeypatch.setattr(torch, "compile", compile)
    return made


# Older versions of torch trace once more, after the first call.
ONCE = 1 if hasattr(torch.optim, "Muon") else 2


def graphs(counter: CompileCounterWithBackend) -> int:
    """Compilations so far; torch makes an empty graph beside the first."""
    return sum(len(each.graph.nodes) > 0 for each in counter.graphs)


def weights_of(
    model: nn.Module, optimizer: optim.Optimizer, rows: list[int], **options: Any
) -> list[Tensor]:
    """Extra weights of each step of a training run with batches of these sizes."""
    reducer = primum.attach(model, optimizer, recipe=Primum(**options))
    found = []
    for number, size in enumerate(rows):
        inputs, labels = batch(number, size, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        report = report_of(reducer)
        assert report.applied, report.reason
        found.append(report.extra_weights)
        optimizer.step()
    assert report.fallbacks == 0
    return found


@BOTH
def test_the_same_training_with_one_graph(kind: Any, options: Any, counter: Any) -> None:
    """Short last batches run eagerly; when full ones come back, nothing is compiled again."""
    model, optimizer = make(kind, options)
    twin, stepper = make_like(model, optimizer)
    rows = [24, 24, 10, 24, 24, 7, 24]
    exact: dict[str, Any] = {"max_iters": MOST, "tolerance": 0.0}
    compiled = weights_of(model, optimizer, rows, compile=True, **exact)
    assert graphs(counter) == ONCE
    eager = weights_of(twin, stepper, rows, **exact)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # float64, summed otherwise
    assert max(float(each.max()) for each in eager) > 0.01


def test_with_the_compiler_that_users_have() -> None:
    """Inductor on the CPU, in a real loop."""
    torch._dynamo.reset()
    model, optimizer = make(dtype=torch.float32)
    twin, stepper = make_like(model, optimizer)
    exact: dict[str, Any] = {"max_iters": 2, "tolerance": 0.0}
    compiled = weights_of(model, optimizer, [24, 24, 5], compile=True, **exact)
    eager = weights_of(twin, stepper, [24, 24, 5], **exact)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("radius", [0.05, 0.4])
def test_the_radius_changes_nothing_else(radius: float, counter: Any) -> None:
    model, optimizer = make(optim.AdamW, ADAMW)
    twin, stepper = make_like(model, optimizer)
    exact: dict[str, Any] = {"max_iters": MOST, "tolerance": 0.0, "radius": radius}
    compiled = weights_of(model, optimizer, [24, 24], compile=True, **exact)
    eager = weights_of(twin, stepper, [24, 24], **exact)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert graphs(counter) == ONCE


def test_radius_zero_compiles_nothing(counter: Any) -> None:
    model, optimizer = make(optim.SGD, SGD)
    found = weights_of(model, optimizer, [24, 24], compile=True, radius=0.0)
    assert all(float(each.max()) == 0 for each in found)
    assert graphs(counter) == 0


@pytest.mark.parametrize("when", ["at once", "when it runs"])
def test_a_compiler_that_fails_costs_a_warning(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no weights: the solver runs eagerly, and is not compiled again."""
    calls: list[str] = []

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(when)
        raise RuntimeError("no compiler here\nand a long story")

    compile = fail if when == "at once" else lambda *_, **__: fail
    monkeypatch.setattr(torch, "compile", compile)
    model, optimizer = make()
    twin, stepper = make_like(model, optimizer)
    with pytest.warns(RuntimeWarning, match="RuntimeError: no compiler here$") as caught:
        found = weights_of(model, optimizer, [24, 24, 10, 24], compile=True)
    assert len(caught) == len(calls) == 1
    assert "runs eagerly" in str(caught[0].message)
    assert caught[0].filename == __file__
    expected = weights_of(twin, stepper, [24, 24, 10, 24])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("tolerance", [0.2, 0.005, 0.0])
def test_the_tolerance_is_certified_or_all_iterations_made(
    tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, on the CPU; where the host reads nothing, the count is fixed."""
    counts: list[int] = []
    recipe = Primum(max_iters=6, tolerance=tolerance)
    whole = Primum.__call__

    def kept(self: Primum, *args: Any) -> Any:
        solution = whole(self, *args)
        counts.append(int(solution.iterations))
        return solution

    monkeypatch.setattr(Primum, "__call__", kept)
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, recipe=recipe)
    for number in range(8):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        gap = float(report_of(reducer).gap)
        assert gap <= tolerance + 1e-12 or counts[-1] == 6
        optimizer.step()
    assert min(counts) < 6 or tolerance == 0
    assert max(counts) == 6 or tolerance > 0
    solver = importlib.import_module("primum.kernel.solver")
    monkeypatch.setattr(solver, "on_host", lambda value: False)
    del counts[:]
    inputs, labels = batch(20, 24)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    assert counts == [6]
