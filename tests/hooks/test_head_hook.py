"""One call of the head, and the gradient that arrives there."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import SGD, batch, make
from primum.hooks.head_hook import HeadCall, HeadHook
from primum.hooks.unsaved import hooked
from primum.kernel.batch import count_rows, reweight, rows_of
from primum.kernel.engine import Engine
from primum.kernel.head import Head
from primum.kernel.recipe import Primum


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def hook_on(layer: nn.Linear) -> HeadHook:
    optimizer = optim.SGD(layer.parameters(), **SGD)
    engine = Engine(Head(layer, {"weight": optimizer, "bias": optimizer}), Primum())
    return HeadHook(layer, engine, reducer=None)


def call_behind(output: Tensor, hook: HeadHook) -> HeadCall | None:
    """The call of the head that made an output, as the hook has noted it."""
    return None if output.grad_fn is None else HeadCall.of(output.grad_fn, hook)


class TestHeadHook:
    def test_keeps_the_input_by_reference(self, head: nn.Linear) -> None:
        hook, inputs = hook_on(head), torch.randn(3, 6)
        for output in (head(inputs), head(input=inputs)):
            call = call_behind(output, hook)
            assert call is not None
            assert call.inputs() is inputs

    def test_silent_where_no_gradient_can_come_back(self, head: nn.Linear) -> None:
        hook, inputs = hook_on(head), torch.randn(3, 6)
        with torch.no_grad():
            head(inputs)
        with torch.inference_mode():
            head(inputs)
        head.requires_grad_(False)
        head(inputs)
        output = head(inputs.requires_grad_())  # frozen: it trains something else
        assert not hook.called
        assert call_behind(output, hook) is None

    def test_sees_what_earlier_hooks_make_of_the_input(self, head: nn.Linear) -> None:
        hook = hook_on(head)
        head.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        inputs = torch.randn(3, 6)
        call = call_behind(head(inputs), hook)
        assert call is not None
        assert torch.equal(call.inputs(), 2 * inputs)

    def test_is_found_on_its_module(self, head: nn.Linear) -> None:
        head.register_forward_hook(lambda *_: None)
        assert hooked(head) == []
        hooks = hook_on(head), hook_on(head)
        assert set(hooked(head)) == set(hooks)

    def test_removed(self, head: nn.Linear) -> None:
        state, hook = dict(vars(head)), hook_on(head)
        hook.remove()
        assert not head._forward_hooks
        assert dict(vars(head)) == state
        output = head(torch.randn(3, 6))
        hook(head, (torch.randn(3, 6),), {}, output)  # as a compiled graph might go on to do
        assert not hook.called
        assert call_behind(output, hook) is None

    def test_copies_are_inert_and_can_be_attached_to(self, head: nn.Linear) -> None:
        hook, copied = hook_on(head), copy.deepcopy(head)
        copied(torch.randn(3, 6))
        assert not hook.called
        own = hook_on(copied)
        copied(torch.randn(3, 6))
        assert own.called

    def test_silent_while_traced(self, head: nn.Linear) -> None:
        hook = hook_on(head)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about torch.jit
            torch.jit.trace(head, torch.randn(3, 6))
        assert not hook.called


class TestHeadCall:
    def test_finds_the_calls_behind_losses(self, head: nn.Linear) -> None:
        key, other = object(), object()
        x, y = torch.randn(3, 6), torch.randn(3, 6)
        outputs = [head(x), head(y)]
        first, second = (HeadCall(key, head, f, o) for f, o in zip((x, y), outputs, strict=True))
        assert list(HeadCall.behind(outputs[0].sum(1), key)) == [first]
        assert list(HeadCall.behind(outputs[1].exp().sum(1), key)) == [second]
        assert set(HeadCall.behind((outputs[0] * outputs[1]).sum(1), key)) == {first, second}
        assert not HeadCall.behind(outputs[0].sum(1), other)
        assert not HeadCall.behind((x * head.weight[0]).sum(1), key)

    def test_the_edge_gives_the_gradient(self, head: nn.Linear) -> None:
        key = object()
        x = torch.randn(3, 6)
        output = head(x)
        waiting = HeadCall(key, head, x, output)
        losses = (output.clone() * torch.arange(4.0)).sum(1)
        del output  # nobody needs to keep it
        edge = HeadCall.behind(losses, key)[waiting]
        (gradient,) = torch.autograd.grad(losses.sum(), (edge,))
        assert torch.equal(gradient, torch.arange(4.0).expand(3, 4))

    def test_survives_changes_in_place(self, head: nn.Linear) -> None:
        key = object()
        x = torch.randn(3, 6)
        output = head(x)
        waiting = HeadCall(key, head, x, output)
        losses = output.mul_(3).sum(1)
        (gradient,) = torch.autograd.grad(losses.sum(), (HeadCall.behind(losses, key)[waiting],))
        assert torch.equal(gradient, torch.full((3, 4), 3.0))

    def test_belongs_to_the_graph(self, head: nn.Linear) -> None:
        gc.collect()
        gc.disable()
        try:
            key = object()
            x = torch.randn(3, 6)
            output = head(x)
            waiting = weakref.ref(HeadCall(key, head, x, output))
            losses = output.sum(1)
            del output
            assert waiting() is not None
            del losses
            assert waiting() is None
        finally:
            gc.enable()

    def test_releases_its_input(self, head: nn.Linear) -> None:
        x = torch.randn(3, 6)
        waiting = HeadCall(object(), head, x, head(x))
        waiting.release()
        assert waiting.inputs() is x
        del x
        with pytest.raises(RuntimeError, match="the head's input was freed"):
            waiting.inputs()

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
        waiting = HeadCall(object(), head, features, output)
        assert waiting.accumulator is not None
        answers: list[bool] = []
        output.register_hook(lambda _: answers.append(waiting.trains_head()))
        wanted = [head.weight] if trained else [below.weight]
        output.float().sum().backward(inputs=wanted)
        assert answers == [trained]


class TestRows:
    def test_shapes(self) -> None:
        one, two = torch.randn(2, 3, 4, 6), torch.randn(2, 6)
        assert rows_of([torch.randn(6)], "sample").shape == (1, 6)
        assert rows_of([one], "sample").shape == (2, 12, 6)
        assert rows_of([one, two], "sample").shape == (2, 13, 6)
        assert rows_of([one], "token").shape == (24, 6)
        assert rows_of([one, torch.randn(24, 6)], "token").shape == (24, 2, 6)
        assert rows_of([torch.randn(6)], "token").shape == (1, 6)
        assert [count_rows(one, "sample"), count_rows(one, "token")] == [2, 24]
        assert [count_rows(torch.randn(6), per) for per in ("sample", "token")] == [1, 1]

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_reweight(self, per: str) -> None:
        one, two = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        weights = torch.rand(2 if per == "sample" else 6)
        rows = weights.view(2, -1, 1)
        for found, each in zip(reweight([one, two], weights, per), (one, two), strict=True):
            torch.testing.assert_close(found, each * (1 + rows))
        (found,) = reweight([torch.ones(4)], torch.tensor([0.5]), per)
        assert torch.equal(found, torch.full((4,), 1.5))


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
