"""Whether rows of the head's output are the samples: what stays plain, and what is reweighted."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from primum.hooks.head_hook import HeadHook
from primum.kernel.engine import Engine
from primum.kernel.head import Head
from primum.kernel.recipe import Primum
from primum.setup.find import given_head
from primum.setup.output_check import OutputCheck

B, T = 6, 4
Finish = Callable[[Tensor, Tensor], Any]


class Net(nn.Module):
    """A body and a head; `finish` makes the output of the head's and of the features."""

    def __init__(self, finish: Finish | None = None, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head, self.other = nn.Linear(8, outputs), nn.Linear(8, 3)
        self.scale, self.finish = nn.Parameter(torch.ones(8)), finish

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        logits = self.head(features)
        return logits if self.finish is None else self.finish(logits, features)


def net(finish: Finish | None = None, outputs: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(finish, outputs)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B,)), 5, generator=torch.Generator().manual_seed(0))


class Attached:
    """A model whose passes are weighed."""

    def __init__(self, model: nn.Module, head: str = "head", radius: float = 0.4) -> None:
        layer = given_head(model, head)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        parts = dict.fromkeys((name for name, _ in layer.named_parameters()), optimizer)
        self.engine = Engine(Head(layer, parts, "head"), Primum(radius=radius))
        self.hook = HeadHook(layer, self.engine, None)
        self.check = OutputCheck(model, self.hook, self.engine)
        self.engine.observers.append(self.check)

    def outcome(self, loss: Tensor) -> str:
        """Of one backward pass: why it stayed plain, or "weighted"."""
        self.engine.last = None
        loss.backward()
        assert self.engine.last is not None
        return "weighted" if self.engine.last.applied else self.engine.last.reason

    @property
    def looks(self) -> bool:
        return self.check._hook is not None and bool(self.check._hook._handle.id in _ids(self))


def _ids(attached: Attached) -> dict[int, Any]:
    hook: Any = attached.check._hook
    module = hook._module()
    return {} if module is None else module._forward_hooks


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    output = vars(output) if isinstance(output, SimpleNamespace) else output
    held = output.values() if isinstance(output, dict) else output
    return [tensor for each in held for tensor in tensors(each)]


def used(output: Any) -> Tensor:
    """A loss that uses all of an output."""
    return sum((each.square().sum() for each in tensors(output)), torch.zeros(()))


GRAPH = torch.rand(B, B, generator=torch.Generator().manual_seed(1)).softmax(1)
PLAIN: dict[str, tuple[Finish, str, tuple[int, ...]]] = {
    "multiple choice": (lambda z, _: z[:, 0].view(B, 2), "has 12 rows, and .* [6, 2]", (2 * B,)),
    "pairs": (lambda z, _: z[:B] - z[B:], "has 12 rows", (2 * B,)),
    "centred": (lambda z, _: z - z.mean(0), "is mixed over its rows", (B,)),
    "batch norm": (lambda z, _: F.batch_norm(z, None, None, training=True), "is mixed", (B,)),
    "softmax over samples": (lambda z, _: z.softmax(0), "is mixed", (B,)),
    "a graph": (lambda z, _: GRAPH @ z, "is mixed", (B,)),
    "another order": (lambda z, _: z.flip(0), "another order", (B,)),
    "time first": (lambda z, _: z.transpose(0, 1), "another order", (B, B)),
    "time first, flattened": (lambda z, _: z.transpose(0, 1).flatten(0, 1), "order", (B, T)),
    "a similarity": (lambda z, _: z @ z.T, "is mixed", (B,)),
}


@pytest.mark.parametrize("case", PLAIN)
def test_rows_that_are_not_samples_stay_plain(case: str) -> None:
    finish, why, shape = PLAIN[case]
    model, twin = net(finish), net(finish)
    used(twin(inputs(*shape))).backward()
    attached = Attached(model)
    loss = used(model(inputs(*shape)))
    with pytest.warns(RuntimeWarning, match=why.replace("[", r"\[")) as caught:
        said = attached.outcome(loss)
    assert "compute the loss as loss = reducer(losses)" in said
    assert len(caught) == 1
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
    assert attached.outcome(used(model(inputs(*shape)))) == said  # once is enough
    assert not attached.looks
    attached.check.before_solving(explicit=True)  # there a row is what the loss makes of it


WEIGHTED: dict[str, tuple[Finish | None, tuple[int, ...]]] = {
    "the head's own output": (None, (B,)),
    "log_softmax": (lambda z, _: F.log_softmax(z, -1), (B,)),
    "squeezed": (lambda z, _: z[:, :1].squeeze(1), (B,)),
    "a constant scale": (lambda z, _: 30 * torch.tanh(z / 30) + torch.ones(3), (B,)),
    "with features": (lambda z, x: (z, x, 2 * x.detach()), (B,)),
    "with what is made of features": (lambda z, x: {"hidden": [x, 2 * x], "logits": z}, (B,)),
    "with a loss": (lambda z, _: {"loss": z.square().mean(), "logits": z}, (B,)),
    "a dataclass": (lambda z, _: SimpleNamespace(logits=z), (B,)),
    "a loss alone": (lambda z, _: z.square().mean(), (B,)),
    "tokens": (lambda z, _: z.log_softmax(-1), (B, T)),
    "tokens, flattened": (lambda z, _: 2 * z.flatten(0, 1), (B, T)),
    "tokens, unflattened": (lambda z, _: 2 * z.view(B, T, 3), (B * T,)),
    "classes first": (lambda z, _: z.transpose(1, 2), (B, T)),
    "a mean over positions": (lambda z, _: z.mean(1), (B, T)),
    "losses": (lambda z, _: z.square().sum(-1).flatten(), (B, T)),
}


@pytest.mark.parametrize("case", WEIGHTED)
def test_rows_that_are_samples_are_reweighted(case: str) -> None:
    finish, shape = WEIGHTED[case]
    model = net(finish)
    attached = Attached(model)
    output = model(inputs(*shape))
    assert not attached.looks
    assert attached.outcome(used(output)) == "weighted"  # warnings are errors
    assert attached.engine.passes == 1


def gaussian(net_: Net, first: bool) -> Finish:
    """Location and scale, by a layer each, in either order."""

    def finish(logits: Tensor, features: Tensor) -> dict[str, Tensor]:
        scale = net_.other(features)
        pair = {"mean": 1 * logits, "scale": scale}
        return pair if first else dict(reversed(list(pair.items())))

    return finish


@pytest.mark.parametrize("first", [False, True])
def test_a_second_layer_that_the_loss_uses(first: bool) -> None:
    model = net()
    model.finish = gaussian(model, first)
    attached = Attached(model)
    with pytest.warns(RuntimeWarning, match=r"only part of .*reducer\(losses\)") as caught:
        said = [attached.outcome(used(model(inputs()))) for _ in range(3)]
    assert len(caught) == 1
    assert "weighted" not in said
    assert said[1] == said[2] == attached.check.trouble


def test_a_second_layer_that_the_loss_does_not_use() -> None:
    """The first pass stays plain, as only it shows that."""
    model = net()
    model.finish = gaussian(model, True)
    attached = Attached(model)
    said = [attached.outcome(model(inputs())["mean"].square().sum()) for _ in range(4)]
    assert said[1:] == ["weighted"] * 3
    assert "whether the loss uses other outputs" in said[0]
    assert int(attached.engine.fallbacks.value) == 0


@pytest.mark.parametrize("uses", [False, True])
@pytest.mark.filterwarnings("ignore:primum")
def test_a_second_layer_beside_a_loss_inside(uses: bool) -> None:
    model = net()
    model.finish = lambda z, x: (z.square().mean(), model.other(x))
    attached = Attached(model)
    for _ in range(2):
        loss, values = model(inputs())
        said = attached.outcome(loss + values.square().mean() if uses else loss)
    assert said == (attached.check.trouble if uses else "weighted")
    assert bool(attached.check.trouble) is uses


@pytest.mark.parametrize("finish", ["sum", "gate"])
def test_parameters_beside_the_head(finish: str) -> None:
    model = net()
    model.finish = {
        "sum": lambda z, x: z + model.other(x),
        "gate": lambda z, x: z.sigmoid() * model.other(x),
    }[finish]
    attached = Attached(model)
    with pytest.warns(RuntimeWarning, match="is only part of the model's output"):
        assert attached.outcome(used(model(inputs()))) == attached.check.trouble


@pytest.mark.parametrize("finish", ["scalar", "temperature"])
def test_what_leaves_rows_apart_is_fine(finish: str) -> None:
    model = net()
    model.finish = {
        "scalar": lambda z, x: (z, model.other(x).square().mean() + z.mean()),
        "temperature": lambda z, _: z * model.scale[0],
    }[finish]
    assert Attached(model).outcome(used(model(inputs()))) == "weighted"


def test_a_head_that_does_not_reach_the_output() -> None:
    kept = []
    model = net(lambda z, x: kept.append(z) or x * model.scale)
    attached = Attached(model)
    output = model(inputs())
    with pytest.warns(RuntimeWarning, match=r"does not reach.*one of: other \(8 -> 3\), body\.0"):
        attached.outcome(used(output) + kept[0].square().sum())


def test_a_head_that_runs_on_the_models_output() -> None:
    """The model gives features, and the loop calls the head."""
    model = net()
    model.forward = lambda x: model.body(x)
    attached = Attached(model)
    for _ in range(3):
        assert attached.outcome(used(model.head(model(inputs())))) == "weighted"
    assert not attached.looks


def test_a_layer_that_is_not_called_is_said_with_the_likely_head() -> None:
    model = net()
    attached = Attached(model, "other")
    used(model(inputs())).backward()
    used(model(inputs())).backward()
    text = "does not call 'head', so no weights are computed; pass head= one of: head (8 -> 3)"
    with pytest.warns(RuntimeWarning, match=re.escape(text)):
        model(inputs())
    assert attached.check.trouble == ""


def test_a_bypassed_head_is_said_elsewhere() -> None:
    model = net()
    model.forward = lambda x: F.linear(model.body(x), model.head.weight)
    Attached(model)
    for _ in range(5):
        used(model(inputs())).backward()  # warnings are errors


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_gradients_that_do_not_tell_are_looked_at_again(value: float) -> None:
    model, factor = net(), [value]
    model.finish = lambda z, _: (z - z.mean(0)) * factor[0]
    attached = Attached(model)
    model(inputs())
    assert attached.looks
    factor[0] = 1.0
    model(inputs())
    assert not attached.looks
    assert "is mixed" in attached.check.trouble


def test_it_gives_up_after_some_passes() -> None:
    model = net(lambda z, _: z * 0)
    attached = Attached(model)
    for number in range(5):
        assert attached.looks, number
        model(inputs())
    assert not attached.looks


def test_only_a_pass_with_gradients_uses_it_up() -> None:
    model = net(lambda z, _: z - z.mean(0))
    attached = Attached(model)
    with torch.no_grad():
        model(inputs())
    with torch.inference_mode():
        model(inputs())
    assert attached.looks
    model.eval()(inputs())
    assert attached.check.trouble


def test_at_radius_0_nothing_is_done() -> None:
    model = net(lambda z, _: z - z.mean(0))
    attached = Attached(model, radius=0.0)
    attached.engine.unread = 1000
    model(inputs())
    assert attached.looks
    assert attached.check.trouble == ""


def test_it_disturbs_nothing() -> None:
    """Random numbers, gradients, and what hooks on the head have seen."""
    found = []
    for checked in (False, True):
        model = net(lambda z, _: F.dropout(z, 0.5) * 1)
        attached = Attached(model)
        if not checked:
            attached.check.remove()
        torch.manual_seed(3)
        output = model(inputs())
        assert all(p.grad is None for p in model.parameters())
        assert attached.engine.passes == 0
        found.append((torch.random.get_rng_state(), output.detach()))
        assert attached.outcome(used(output)) == "weighted"
        found[-1] += tuple(p.grad for p in model.parameters() if p.grad is not None)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_left_alone(backend: str) -> None:
    torch.compiler.reset()
    model = net(lambda z, _: z - z.mean(0))
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    attached = Attached(model)
    used(compiled(inputs())).backward()
    assert attached.check.trouble == ""


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.head, self.body(x), use_reentrant=reentrant)

    model = Checkpointed()
    attached = Attached(model)
    assert attached.outcome(used(model(inputs()))) == "weighted"


def test_transforms_and_export_are_left_alone() -> None:
    model = net(lambda z, _: z - z.mean(0))
    attached = Attached(model)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return used(torch.func.functional_call(model, params, (x,)))

    torch.func.grad(loss)(params, inputs())
    torch.export.export(model, (inputs(),))
    assert attached.looks
    assert attached.check.trouble == ""


def test_an_error_is_logged_and_leaves_the_pass_alone(caplog: pytest.LogCaptureFixture) -> None:
    def cyclic(logits: Tensor, _: Tensor) -> Any:
        found: list[Any] = [logits]
        found.append(found)
        return found

    model = net(cyclic)
    attached = Attached(model)
    with caplog.at_level("INFO", "primum"):
        assert attached.outcome(model(inputs())[0].square().sum()) == "weighted"
    assert [each.levelname for each in caplog.records] == ["INFO"]
    assert "could not check the model's output: RecursionError" in caplog.text
    assert not attached.looks


def test_a_model_that_becomes_private_stays_plain() -> None:
    model = net()
    attached = Attached(model)
    model.head.weight.grad_sample = None
    with pytest.warns(RuntimeWarning, match="differential privacy"):
        attached.outcome(used(model(inputs())))


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("mixed", [False, True])
def test_under_data_parallelism(options: dict[str, Any], mixed: bool) -> None:
    """Before what it adds to the graph, whose backward has effects."""
    model = nn.parallel.DistributedDataParallel(
        net((lambda z, _: z - z.mean(0)) if mixed else lambda z, _: 2 * z), **options
    )
    attached = Attached(model, "module.head")
    output = model(inputs())
    assert ("is mixed" in attached.check.trouble) is mixed
    if not mixed:
        assert attached.outcome(used(output)) == "weighted"


@pytest.mark.parametrize("how", ["first pass", "remove"])
def test_leaves_nothing_behind(how: str) -> None:
    model = net()
    before, pickled = dict(vars(model)), pickle.dumps(model)
    attached = Attached(model)
    assert pickle.dumps(model) == pickled
    if how == "first pass":
        model(inputs())
    else:
        attached.check.remove()
    attached.hook.remove()
    assert vars(model) == before
    assert pickle.dumps(model) == pickled


def test_a_model_that_is_its_own_head_is_not_checked() -> None:
    model = nn.Linear(5, 3)
    attached = Attached(model, "")
    assert attached.check._hook is None
    assert attached.outcome(used(model(inputs()))) == "weighted"
