"""Whether the found layer makes the model's output: what is warned about, and what is not."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import primum
from primum.hooks.unsaved import hooked

PART = "the output of 'head' is only part of the model's output"
ELSEWHERE = "the output of 'head' does not reach the model's output"


class Net(nn.Module):
    """A body and a head; `finish` makes the output of the head's and of the features."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.finish = finish

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        logits = self.head(features)
        return logits if self.finish is None else self.finish(logits, features)


@dataclass
class Record:
    loss: Tensor | None
    logits: Tensor


def attached(model: nn.Module, **options: Any) -> primum.Reducer:
    return primum.attach(model, optim.SGD(model.parameters(), lr=0.1), **options)


def inputs() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def first(output: Any) -> Tensor:
    """A tensor of the output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Record):
        return output.logits
    return first(output["logits"] if isinstance(output, dict) else output[0])


def checked(model: nn.Module) -> bool:
    """Whether a check waits on the model."""
    return len(hooked(model)) > 0


SILENT: dict[str, Callable[[Tensor, Tensor], Any] | None] = {
    "the head itself": None,
    "log_softmax": lambda logits, _: F.log_softmax(logits, -1),
    "squeeze": lambda logits, _: logits[:, :1].squeeze(1),
    "constant scale": lambda logits, _: 30 * torch.tanh(logits / 30) + torch.ones(4),
    "tuple with features": lambda logits, features: (logits, features),
    "nested": lambda logits, features: {"aux": [features], "logits": logits},
    "dataclass": lambda logits, _: Record(None, logits),
}


@pytest.mark.parametrize("finish", SILENT.values(), ids=SILENT)
def test_outputs_that_the_head_makes(finish: Any) -> None:
    model = Net(finish)
    attached(model)
    assert checked(model)
    for _ in range(2):
        first(model(inputs())).sum().backward()
    assert not checked(model)


def test_a_model_output_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Net(
        lambda logits, features: outputs.SequenceClassifierOutput(None, logits, (features,))
    )
    attached(model)
    model(inputs()).logits.sum().backward()
    assert not checked(model)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("averaged", [False, True])
def test_under_data_parallelism(one_rank: None, averaged: bool) -> None:
    model = nn.parallel.DistributedDataParallel(TwoHeads() if averaged else Net())
    options: dict[str, Any] = {"head": "module.head"} if averaged else {}
    attached(model, **options)
    assert checked(model)
    with pytest.warns(RuntimeWarning, match="part of") if averaged else nullcontext():
        model(inputs()).sum().backward()
    assert not checked(model)


class TwoHeads(nn.Module):
    """The mean of two heads over the same features, in one list, as distilled models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = nn.Linear(6, 8), nn.Bilinear(8, 8, 4)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        both: Tensor = (self.head(features) + self.other(features, features)) / 2
        return both


class Gated(nn.Module):
    """The layer that is found makes the gate of a squeeze-and-excite block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.body(x.unsqueeze(1))
        return (torch.sigmoid(self.head(maps.mean(2))).unsqueeze(2) * maps).mean(2)


class Detached(Net):
    """The head runs for a report, and the output is made by a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.report: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        self.report = self.head(features)
        return features * self.scale


@pytest.mark.parametrize(
    ("model", "message"),
    [(TwoHeads(), PART), (Gated(), PART), (Detached(), ELSEWHERE)],
    ids=["two heads", "squeeze-excite gate", "elsewhere"],
)
def test_warns_once_and_names_the_layer(model: nn.Module, message: str) -> None:
    attached(model)
    with pytest.warns(RuntimeWarning, match=re.escape(message)) as caught:
        model(inputs()).sum()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not checked(model)
    model(inputs()).sum()  # warnings are errors here


@pytest.mark.parametrize("head", ["head", "module"])
def test_a_head_that_was_passed_is_checked_too(head: str) -> None:
    model = Gated()
    attached(model, head=model.head if head == "module" else head)
    with pytest.warns(RuntimeWarning, match=re.escape(PART)):
        model(inputs())


def test_an_inner_layer_that_was_passed() -> None:
    model = Net()
    attached(model, head="body.0")
    said = r"output of 'body.0' is only part of the model's output.*pass head= the layer that"
    with pytest.warns(RuntimeWarning, match=said):
        model(inputs())


def test_only_a_training_pass_with_gradients_uses_it_up() -> None:
    model = Gated()
    attached(model)
    model.eval()(inputs())
    model.train()
    with torch.no_grad():
        model(inputs())
    with torch.inference_mode():
        model(inputs())
    assert checked(model)
    with pytest.warns(RuntimeWarning, match=re.escape(PART)):
        model(inputs())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_left_alone(backend: str) -> None:
    torch.compiler.reset()
    for model in (Net(), TwoHeads()):
        compiled = torch.compile(model, backend=backend)
        attached(compiled if isinstance(model, Net) else model)
        compiled(inputs()).sum().backward()


def test_transforms_and_export_are_left_alone() -> None:
    model = Gated()
    attached(model)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, params, (x,))
        return outputs.sum()

    torch.func.grad(loss)(params, inputs())
    torch.export.export(model, (inputs(),))
    assert checked(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_hide_nothing_to_warn_of(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            features = self.body(x)
            logits: Tensor = checkpoint(self.head, features, use_reentrant=reentrant)
            return logits

    model = Checkpointed()
    attached(model)
    model(inputs()).sum().backward()


@pytest.mark.parametrize("kind", ["frozen", "uncalled"])
def test_a_head_without_a_pass_is_the_monitors_business(kind: str) -> None:
    model = Net()
    attached(model)
    if kind == "frozen":
        model.head.requires_grad_(False)
        model(inputs())
    else:
        model.forward = lambda x: F.linear(model.body(x), model.head.weight)  # type: ignore
        model(inputs())
    assert not checked(model)


@pytest.mark.parametrize("how", ["first pass", "remove", "detach"])
def test_leaves_nothing_behind(how: str) -> None:
    torch.manual_seed(0)
    model = Net()
    before, pickled = dict(vars(model)), pickle.dumps(model)
    reducer = attached(model)
    assert pickle.dumps(model) == pickled
    if how == "first pass":
        model(inputs())
    elif how == "remove":
        reducer.remove()
    else:
        primum.detach(model)
    assert not checked(model)
    assert vars(model) == before
    assert len(model._forward_hooks) == len(model._forward_hooks_with_kwargs) == 0
    assert pickle.dumps(model) == pickled


def test_an_error_in_the_check_leaves_the_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("primum.output_check._trace", broken)
    model = Net()
    attached(model)
    with pytest.warns(RuntimeWarning, match=r"could not check whether 'head' produces the model"):
        model(inputs()).sum().backward()
    model(inputs()).sum().backward()


def test_an_output_that_holds_itself() -> None:
    class Cyclic(Net):
        def forward(self, x: Tensor) -> Any:
            found = [super().forward(x)]
            found.append(found)
            return found

    model = Cyclic()
    attached(model)
    with pytest.warns(RuntimeWarning, match="model's output: RecursionError"):
        model(inputs())[0].sum().backward()
    assert not checked(model)
