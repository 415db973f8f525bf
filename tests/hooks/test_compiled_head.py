"""Graphs that torch.compile makes: a graph break is acceptable, a silent no-op is not."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, assert_close, batch, gradients, make, report_of, train


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


# torch.compile asks every tensor for its gradient, and hides that warning by hand.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("_fresh_compiler")
class TestCompile:
    def check(
        self,
        model: nn.Sequential,
        compiled: Callable[[Tensor], Tensor],
        reducer: primum.Reducer,
    ) -> None:
        """The gradients of the compiled model are weighed: those of the weighted loss on a copy."""
        inputs, labels = batch(0, 24, dtype=torch.float32)
        twin = copy.deepcopy(model)
        model.zero_grad()
        F.cross_entropy(compiled(inputs), labels).backward()
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 2e-5)
        assert report_of(reducer).fallbacks == 0

    @BACKENDS
    @pytest.mark.parametrize("attach_to", ["model", "compiled"])
    def test_attached_before_it_runs(self, backend: str, attach_to: str) -> None:
        model, optimizer = make(dtype=torch.float32)
        compiled = torch.compile(model, backend=backend)
        reducer = primum.attach({"model": model, "compiled": compiled}[attach_to], optimizer)
        self.check(model, compiled, reducer)

    @BACKENDS
    def test_compiled_after_attaching(self, backend: str) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        compiled = torch.compile(model, backend=backend)
        self.check(model, compiled, reducer)
        twin = copy.deepcopy(model)
        reducer.remove()  # and it is plain again
        inputs, labels = batch(1, 24, dtype=torch.float32)
        for net, forward in ((model, compiled), (twin, twin)):
            net.zero_grad()
            F.cross_entropy(forward(inputs), labels).backward()
        assert_close(gradients(model), gradients(twin), 1e-6)
        assert reducer.last is None

    def test_attached_too_late_is_said_and_can_be_mended(self) -> None:
        """torch.compile does not recompile when a hook is added: no weights would be applied."""
        model, optimizer = make(dtype=torch.float32)
        compiled = torch.compile(model, backend="aot_eager")
        train(compiled, optimizer, 1)
        reducer = primum.attach(compiled, optimizer)
        train(compiled, optimizer, 1)
        assert reducer.last is None
        with pytest.warns(RuntimeWarning, match=r"bypassed.*torch\.compiler\.reset"):
            train(compiled, optimizer, 1)
        train(compiled, optimizer, 1)  # said once
        torch.compiler.reset()
        self.check(model, compiled, reducer)

    def test_a_plain_baseline_of_the_same_class_before_is_said(self) -> None:
        """torch.compile runs what it compiled for the baseline, which has no hook."""
        model, optimizer = make(dtype=torch.float32)
        train(torch.compile(model, backend="aot_eager"), optimizer, 1)
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        compiled = torch.compile(model, backend="aot_eager")
        with pytest.warns(RuntimeWarning, match=r"another of its class.*torch\.compiler\.reset"):
            train(compiled, optimizer, 2)
        torch.compiler.reset()
        self.check(model, compiled, reducer)

    @BACKENDS
    def test_compiled_in_place(self, backend: str) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        twin = copy.deepcopy(model)
        model.compile(backend=backend)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        F.cross_entropy(model(inputs), labels).backward()
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 2e-5)

    @BACKENDS
    def test_compiled_loss(self, backend: str) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)

        @torch.compile(backend=backend)
        def losses_of(inputs: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs), labels, reduction="none")

        inputs, labels = batch(0, 24, dtype=torch.float32)
        twin = copy.deepcopy(model)
        reducer(losses_of(inputs, labels)).backward()  # the explicit form, too
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 2e-5)

    @pytest.mark.parametrize(
        ("backend", "kind", "options"),
        [("eager", optim.SGD, SGD), ("aot_eager", optim.AdamW, ADAMW)],
    )
    def test_compiled_step(self, backend: str, kind: Any, options: Any) -> None:
        """Forward, backward and optimizer in one compiled function."""
        (one, fast), (two, slow) = (make(kind, options, dtype=torch.float32) for _ in range(2))
        reducers = [primum.attach(one, fast), primum.attach(two, slow)]

        @torch.compile(backend=backend)
        def step(inputs: Tensor, labels: Tensor) -> None:
            fast.zero_grad()
            F.cross_entropy(one(inputs), labels).backward()
            fast.step()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about its profiler
            for number in range(3):
                step(*batch(number, 24, dtype=torch.float32))
                train(two, slow, 1, first=number)
                a, b = (report_of(each).extra_weights for each in reducers)
                assert b.max() > 0.01
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert report_of(reducers[0]).fallbacks == 0

    def test_no_graph_break_in_evaluation(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        primum.attach(model, optimizer)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        inputs, _ = batch(0, 24, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs), model(inputs))

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_whole_graphs(self, backend: str) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            self.check(model, compiled, reducer)
            optimizer.step()
        reducer.enabled = False
        assert self.is_plain(model, compiled)
        reducer.remove()
        assert self.is_plain(model, compiled)

    def is_plain(self, model: nn.Sequential, compiled: Callable[[Tensor], Tensor]) -> bool:
        inputs, labels = batch(0, 24, dtype=torch.float32)
        twin = copy.deepcopy(model)
        for net, forward in ((model, compiled), (twin, twin)):
            net.zero_grad()
            F.cross_entropy(forward(inputs), labels).backward()
        assert_close(gradients(model), gradients(twin), 1e-6)
        return True

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
    def test_outputs_that_are_changed_in_place(self, backend: str) -> None:
        """In the graph and after it: a mask, a temperature. As a plain model allows."""
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)

        def masked(inputs: Tensor) -> Tensor:
            logits: Tensor = model(inputs)
            logits[:, 0] = -1.0
            return logits

        twin, compiled = copy.deepcopy(model), torch.compile(masked, backend=backend)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        logits = compiled(inputs)
        logits /= 2
        F.cross_entropy(logits, labels).backward()
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        others = twin(inputs).index_fill(1, torch.tensor([0]), -1.0) / 2
        ((1 + w) * F.cross_entropy(others, labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 2e-5)

    def test_whole_graph_of_the_losses_under_autocast(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)

        def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.cross_entropy(model(inputs), labels)

        inputs, labels = batch(0, 24, dtype=torch.float32)
        loss_of(inputs, labels).backward()
        expected = report_of(reducer).extra_weights
        assert expected.max() > 0.01
        model.zero_grad()
        compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        with pytest.warns(RuntimeWarning, match="discarded before an optimizer"):
            compiled(inputs, labels).backward()
        report = report_of(reducer)
        assert report.extra_weights is not expected
        torch.testing.assert_close(report.extra_weights, expected, rtol=0.02, atol=0.01)

    def test_export(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        primum.attach(model, optimizer)
        inputs, _ = batch(0, 24, dtype=torch.float32)
        program = torch.export.export(model.eval(), (inputs,))
        torch.testing.assert_close(program.module()(inputs), model(inputs))

    def test_an_inert_copy_compiles_whole(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        primum.attach(model, optimizer)
        copied = copy.deepcopy(model)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        compiled = torch.compile(copied, backend="eager", fullgraph=True)
        F.cross_entropy(compiled(inputs), labels).backward()
        assert copied[2].weight.grad is not None

    def test_compiled_autograd(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)

        @torch.compile(backend="aot_eager")
        def step(inputs: Tensor, labels: Tensor) -> None:
            F.cross_entropy(model(inputs), labels).backward()

        inputs, labels = batch(0, 24, dtype=torch.float32)
        twin = copy.deepcopy(model)
        with torch._dynamo.config.patch(compiled_autograd=True):
            step(inputs, labels)
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 2e-5)
