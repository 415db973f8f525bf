"""What makes a step cheap on a GPU, checked without one: no wait for the device, few launches.

Run as a program it trains on `phantom`, an accelerator that has no memory: every tensor on it is
fake, so any look at a value raises. A CPU build of torch cannot differentiate on fake CUDA tensors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch._subclasses import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import primum
from primum import Primum, Problem, Solution, solve
from primum.guards import gradient_scale
from primum.kernel import builder, gram
from primum.kernel import solver as solving
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.tokens import sketch

ROUTES = {"dense": MatrixFree.dense, "matrix-free": lambda gram: gram}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda params: optim.AdamW(params, lr=1e-3),
}
by_route = pytest.mark.parametrize("route", ROUTES)
by_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)

# Dispatched operations; two of them guard the step length, as on the host.
PER_ITERATION = {"dense": 16, "matrix-free": 21}
OUTSIDE = 150
SKETCH = 120  # for two passes over one chunk each, and one block of outputs

# Operations that hand a value to the host, or a shape that depends on one.
SYNCS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}


class Count(TorchDispatchMode):
    """The names of dispatched operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(
    kind: str,
    *,
    max_iters: int = 20,
    shape: tuple[int, ...] = (128,),
    outputs: int = 10,
    **how: Any,
) -> list[str]:
    """What the reducer dispatches in the third step of a head with 64 inputs."""
    torch.manual_seed(0)
    head = nn.Linear(64, outputs)
    optimizer = OPTIMIZERS[kind](head.parameters())
    reducer = primum.attach(head, optimizer, recipe=Primum(max_iters=max_iters), **how)
    engine = reducer._engine
    inside = engine.reweight
    counts = []

    def counted(*args: Any) -> list[Tensor] | None:
        with Count() as count:
            result = inside(*args)
        counts.append(count.names)
        return result

    engine.reweight = counted  # type: ignore[method-assign, assignment]
    for _ in range(3):
        logits, labels = head(torch.randn(*shape, 64)), torch.randint(outputs, shape)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        assert reducer.last is not None
        assert reducer.last.reason == ""
        optimizer.step()
    assert len(counts) == 3
    return counts[-1]


def force(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That form of the operator, and what is done where a look at a value would wait."""
    for module in (builder, sketch):
        monkeypatch.setattr(module, "choose_form", lambda gram, products: ROUTES[route](gram))
    for module in (solving, builder, gradient_scale, gram):
        monkeypatch.setattr(module, "on_host", lambda value: False)


# --- nothing waits, few operations ----------------------------------------------------------------


@by_optimizer
@by_route
def test_operations_per_iteration_and_outside(kind, route, monkeypatch):
    force(route, monkeypatch)
    counts = {n: len(operations(kind, max_iters=n)) for n in (10, 19, 20)}
    each = counts[20] - counts[19]
    assert counts[19] - counts[10] == 9 * each  # every iteration costs the same
    assert each <= PER_ITERATION[route]
    assert counts[20] - 20 * each <= OUTSIDE, operations(kind, max_iters=1)


@by_optimizer
@by_route
@pytest.mark.parametrize("shape", [(128,), (16, 5)], ids=["flat", "sequence"])
def test_no_host_sync(kind, route, shape, monkeypatch):
    force(route, monkeypatch)
    names = set(operations(kind, shape=shape))
    allowed = {"repeat_interleave"} if len(shape) == 2 else set()  # by a number: a shape known
    assert not names & (SYNCS - allowed)


@by_optimizer
def test_no_host_sync_when_approximated(kind, monkeypatch):
    """Per token, with more outputs than columns of the sketch; iterations cost what they did."""
    force("matrix-free", monkeypatch)
    monkeypatch.setattr(sketch, "FEW", 0)
    sketched: dict[str, Any] = {"shape": (16, 40), "outputs": 2000, "per": "token"}
    names = operations(kind, **sketched)
    assert not set(names) & SYNCS
    assert names.count("bitwise_xor") == 3  # the signs: it was sketched
    counts = {n: len(operations(kind, max_iters=n, **sketched)) for n in (10, 20)}
    assert counts[20] - counts[10] <= 10 * max(PER_ITERATION.values())
    assert counts[10] <= 10 * max(PER_ITERATION.values()) + OUTSIDE + SKETCH


def test_the_count_would_see_a_sync():
    with Count() as count:
        torch.ones(1).item()
        bool(torch.ones(1) > 0)
    assert count.names.count("_local_scalar_dense") == 2


# --- on an accelerator without values -------------------------------------------------------------


def phantom_step(
    kind: str,
    *,
    capturable: bool,
    bias: bool,
    shape: tuple[int, ...],
    outputs: int = 4,
    per: str = "sample",
) -> None:
    """Two steps of forward, backward with a reducer attached, optimizer, on fake tensors."""
    device = "cuda" if torch.backends.cuda.is_built() else "phantom"
    with FakeTensorMode():
        with torch.device(device):
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs, bias=bias))
        if kind == "SGD":
            optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = optim.AdamW(model.parameters(), capturable=capturable)
        reducer = primum.attach(model, optimizer, recipe=Primum(max_iters=3), per=per)
        for number in range(2):
            inputs = torch.randn(*shape, 6, device=device)
            labels = torch.randint(outputs, shape, device=device)
            optimizer.zero_grad()
            logits = model(inputs).flatten(0, -2)
            nn.functional.cross_entropy(logits, labels.flatten()).backward()
            report = reducer.last
            assert report is not None, "the hook did not run"
            assert report.why == "", report.why
            assert report.weighted
            rows = shape[:1] if per == "sample" else (shape[0] * shape[1],)
            assert report.extra_weights.shape == rows
            assert report.approximate is (per == "token")
            for figure in (report.extra_weights, report.harm_after, report.gap, report.fallbacks):
                assert figure.device.type == device
            optimizer.step()
            steps = [state["step"] for state in optimizer.state.values() if "step" in state]
            assert all(s.device.type == (device if capturable else "cpu") for s in steps)
            print(kind, capturable, bias, shape, number)


def phantom() -> None:
    if not torch.backends.cuda.is_built():
        module = backend_registration._DummyBackendModule()
        module.get_amp_supported_dtype = lambda: [torch.float16]  # type: ignore[attr-defined]
        backend_registration._setup_privateuseone_for_python_backend("phantom", module)
    phantom_step("SGD", capturable=False, bias=True, shape=(16,))
    phantom_step("AdamW", capturable=True, bias=True, shape=(16,))
    phantom_step("AdamW", capturable=True, bias=False, shape=(5, 3))
    phantom_step("AdamW", capturable=False, bias=True, shape=(5, 3))
    large: dict[str, Any] = {"shape": (40, 50), "outputs": 4000, "per": "token"}
    sketch.FEW = 0  # type: ignore[misc]
    phantom_step("SGD", capturable=False, bias=True, **large)
    phantom_step("AdamW", capturable=True, bias=True, **large)
    phantom_step("AdamW", capturable=True, bias=False, **large)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make up an accelerator",
)
def test_a_training_step_on_an_accelerator_without_values():
    """In a process of its own: an accelerator, once registered, stays. Warnings are errors there.

    Nothing may be swallowed: an exception of ours ends in `report.reason`, and a warning.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", __file__],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 7 * 2


# --- compiled -------------------------------------------------------------------------------------


def problem_of(route: str, elementwise: bool, seed: int) -> Problem:
    """Data, scale, step and reach all depend on the seed; shapes do not."""
    rng = torch.Generator().manual_seed(seed)
    x, g = torch.randn(48, 9, generator=rng), torch.randn(48, 5, generator=rng)
    step = torch.randn(5, 9, generator=rng)
    gain = torch.rand(5, 9, generator=rng) + 0.1 if elementwise else 1.0
    head = MatrixFree(x, g * 10.0**-seed, gain)
    reach = 0.1 * (seed + 1) * Update(step, gain, 1.0).norm("gain")
    return Problem(ROUTES[route](head), head.along(step), reach)


def same(got: Solution, expected: Solution) -> None:
    """Up to rounding: a compiler may fuse, and sum in another order."""
    # Weights the problem does not pin down could differ by more; on these problems they do not.
    torch.testing.assert_close(got.extra_weights, expected.extra_weights, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.objective, expected.objective, rtol=1e-4, atol=0)
    torch.testing.assert_close(got.lower_bound, expected.lower_bound, rtol=1e-4, atol=0)
    torch.testing.assert_close(got.drift_after, expected.drift_after, rtol=1e-3, atol=1e-4)
    assert got.iterations >= expected.iterations  # in eager mode it stops once certified


@pytest.mark.parametrize(
    ("route", "elementwise"), [("dense", False), ("matrix-free", False), ("matrix-free", True)]
)
def test_solve_compiles_whole_and_once(route, elementwise):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(solve, fullgraph=True, backend=counter)
    for seed in range(3):
        problem = problem_of(route, elementwise, seed)
        found = compiled(problem, 8)  # quicker to trace than 20
        assert found.iterations == 8
        same(found, solve(problem, 8))
    assert counter.frame_count == 1  # once, whatever the values


@pytest.mark.cuda
@by_route
def test_solve_compiled_for_the_gpu(route):
    compiled = torch.compile(solve, fullgraph=True)
    problem = problem_of(route, True, 1)
    same(compiled(problem), solve(problem))


@pytest.mark.cuda
@by_optimizer
def test_no_sync_on_a_real_gpu(kind):
    """The driver's own word for it: it raises on anything that waits."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    optimizer = OPTIMIZERS[kind](model.parameters())
    reducer = primum.attach(model, optimizer)
    for _ in range(3):
        inputs, labels = torch.randn(128, 64).cuda(), torch.randint(10, (128,)).cuda()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    assert reducer.last is not None
    assert reducer.last.reason == ""


if __name__ == "__main__":
    phantom()
