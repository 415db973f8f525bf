"""What comes by at the head, in graphs that torch.compile makes too."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, assert_close, batch, gradients, make, report_of, train
from primum.hooks.head_hook import Listener, Pass, reweight, rows_of, samples
from primum.hooks.unsaved import hooked


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


class Log:
    """An owner of a Listener that notes the calls of the head."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def on_forward(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        self.calls.append((features, output))

    def on_compiled(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool
    ) -> Tensor | None:
        return None


def logged(head: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    """The calls of a head, as a Listener reports them."""
    log = Log()
    Listener(head, log)
    return log.calls


class TestListener:
    def test_reports_input_and_output(self, head: nn.Linear) -> None:
        calls = logged(head)
        inputs = torch.randn(3, 6)
        output = head(inputs)
        assert len(calls) == 1
        assert calls[0][0] is inputs
        assert calls[0][1] is output
        head(input=inputs)
        assert calls[1][0] is inputs

    def test_silent_where_no_gradient_can_come_back(self, head: nn.Linear) -> None:
        calls = logged(head)
        inputs = torch.randn(3, 6)
        with torch.no_grad():
            head(inputs)
        with torch.inference_mode():
            head(inputs)
        head.requires_grad_(False)
        head(inputs)
        assert not calls
        head(inputs.requires_grad_())  # a frozen head passes gradients on
        assert len(calls) == 1

    def test_sees_what_earlier_hooks_make_of_the_input(self, head: nn.Linear) -> None:
        calls = logged(head)
        head.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        inputs = torch.randn(3, 6)
        head(inputs)
        assert torch.equal(calls[0][0], 2 * inputs)

    def test_sees_the_output_before_other_hooks(self, head: nn.Linear) -> None:
        head.register_forward_hook(lambda _, args, output: 2 * output)
        calls = logged(head)
        inputs = torch.randn(3, 6)
        output = head(inputs)
        assert torch.equal(2 * calls[0][1], output)

    def test_is_found_on_its_module(self, head: nn.Linear) -> None:
        head.register_forward_hook(lambda *_: None)
        assert hooked(head) == []
        listener = Listener(head, Log())
        assert hooked(head) == [listener]
        other = Listener(head, Log())
        assert set(hooked(head)) == {listener, other}

    def test_removed(self, head: nn.Linear) -> None:
        state, log = dict(vars(head)), Log()
        calls, listener = log.calls, Listener(head, log)
        listener.remove()
        assert not head._forward_hooks
        assert dict(vars(head)) == state
        head(torch.randn(3, 6))
        output = head(torch.randn(3, 6))
        listener(head, (torch.randn(3, 6),), {}, output)  # as a compiled graph might go on to do
        assert not calls

    def test_copies_are_inert_and_can_be_attached_to(self, head: nn.Linear) -> None:
        calls = logged(head)
        copied = copy.deepcopy(head)
        assert copied(torch.randn(3, 6)).shape == (3, 4)
        assert not calls
        own = logged(copied)
        copied(torch.randn(3, 6))
        assert len(own) == 1

    def test_silent_while_traced(self, head: nn.Linear) -> None:
        calls = logged(head)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about torch.jit
            torch.jit.trace(head, torch.randn(3, 6))
        assert not calls


class TestPass:
    def test_finds_the_calls_behind_losses(self, head: nn.Linear) -> None:
        key, other = object(), object()
        x, y = torch.randn(3, 6), torch.randn(3, 6)
        outputs = [head(x), head(y)]
        first, second = (Pass(key, head, f, o) for f, o in zip((x, y), outputs, strict=True))
        assert list(Pass.behind(outputs[0].sum(1), key)) == [first]
        assert list(Pass.behind(outputs[1].exp().sum(1), key)) == [second]
        assert set(Pass.behind((outputs[0] * outputs[1]).sum(1), key)) == {first, second}
        assert not Pass.behind(outputs[0].sum(1), other)
        assert not Pass.behind((x * head.weight[0]).sum(1), key)

    def test_the_edge_gives_the_gradient(self, head: nn.Linear) -> None:
        key = object()
        x = torch.randn(3, 6)
        output = head(x)
        waiting = Pass(key, head, x, output)
        losses = (output.clone() * torch.arange(4.0)).sum(1)
        del output  # nobody needs to keep it
        edge = Pass.behind(losses, key)[waiting]
        (gradient,) = torch.autograd.grad(losses.sum(), (edge,))
        assert torch.equal(gradient, torch.arange(4.0).expand(3, 4))

    def test_survives_changes_in_place(self, head: nn.Linear) -> None:
        key = object()
        x = torch.randn(3, 6)
        output = head(x)
        waiting = Pass(key, head, x, output)
        losses = output.mul_(3).sum(1)
        (gradient,) = torch.autograd.grad(losses.sum(), (Pass.behind(losses, key)[waiting],))
        assert torch.equal(gradient, torch.full((3, 4), 3.0))

    def test_belongs_to_the_graph(self, head: nn.Linear) -> None:
        gc.collect()
        gc.disable()
        try:
            key = object()
            x = torch.randn(3, 6)
            output = head(x)
            waiting = weakref.ref(Pass(key, head, x, output))
            losses = output.sum(1)
            del output
            assert waiting() is not None
            del losses
            assert waiting() is None
        finally:
            gc.enable()

    def test_releases_its_input(self, head: nn.Linear) -> None:
        x = torch.randn(3, 6)
        waiting = Pass(object(), head, x, head(x))
        waiting.release()
        assert waiting.features() is x
        del x
        with pytest.raises(RuntimeError, match="the head's input was freed"):
            waiting.features()

    @pytest.mark.parametrize("shape", [(6,), (3, 6), (3, 2, 6), (3, 2, 2, 6)])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("autocast", [True, False])
    @pytest.mark.parametrize("trained", [True, False])
    def test_knows_whether_the_head_is_trained(
        self, shape: tuple[int, ...], bias: bool, autocast: bool, trained: bool
    ) -> None:
        below, head = nn.Linear(6, 6), nn.Linear(6, 4, bias=bias)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            features = below(torch.randn(shape))
            output = head(features)
        waiting = Pass(object(), head, features, output)
        assert waiting.accumulator is not None
        answers: list[bool] = []
        output.register_hook(lambda _: answers.append(waiting.trains_head()))
        wanted = [head.weight] if trained else [below.weight]
        output.float().sum().backward(inputs=wanted)
        assert answers == [trained]


class TestSamples:
    def test_shapes(self) -> None:
        one, two = torch.randn(2, 3, 4, 6), torch.randn(2, 6)
        assert samples([torch.randn(6)], "sample").shape == (1, 6)
        assert samples([one], "sample").shape == (2, 12, 6)
        assert samples([one, two], "sample").shape == (2, 13, 6)
        assert samples([one], "token").shape == (24, 6)
        assert samples([one, torch.randn(24, 6)], "token").shape == (24, 2, 6)
        assert samples([torch.randn(6)], "token").shape == (1, 6)
        assert [rows_of(one, "sample"), rows_of(one, "token")] == [2, 24]
        assert [rows_of(torch.randn(6), per) for per in ("sample", "token")] == [1, 1]

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_reweight(self, per: str) -> None:
        one, two = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        weights = torch.rand(2 if per == "sample" else 6)
        rows = weights.view(2, -1, 1)
        for found, each in zip(reweight([one, two], weights, per), (one, two), strict=True):
            torch.testing.assert_close(found, each * (1 + rows))
        (found,) = reweight([torch.ones(4)], torch.tensor([0.5]), per)
        assert torch.equal(found, torch.full((4,), 1.5))


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
    """A graph break is acceptable, a silent no-op is not."""

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

    def test_compiled_in_eval_mode_is_said(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        with pytest.warns(RuntimeWarning, match="eval mode"):
            F.cross_entropy(compiled(inputs), labels).backward()
        assert not report_of(reducer).applied

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


def test_optimizer_is_not_kept_alive_by_the_graph_after_removal() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    ref = weakref.ref(optimizer)
    reducer.remove()
    del optimizer, reducer, loss
    gc.collect()
    assert ref() is None
    assert isinstance(optim.SGD(model.parameters()), optim.SGD)
