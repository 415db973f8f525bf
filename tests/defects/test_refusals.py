"""What is refused is refused in words that name the thing and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

from .scene import assert_equal, batch, gradients, net, plain_gradients, report_of, sgd, warned


def alien(name: str, module: str, *bases: type) -> type:
    """A class of that name, from a package that need not be installed."""
    return type(name, bases, {"__module__": module})


@pytest.mark.parametrize(
    ("name", "module", "way_out"),
    [
        ("Optimizer", "fastai.optimizer", "OptimWrapper"),
        ("SGD", "keras.src.backend.torch.optimizers.torch_sgd", "torch"),
    ],
)
def test_an_optimizer_of_another_package_is_named_in_full(
    name: str, module: str, way_out: str
) -> None:
    optimizer = alien(name, module)()
    with pytest.raises(TypeError) as caught:
        primum.attach(net(), optimizer)
    message = str(caught.value)
    assert f"{module}.{name}" in message
    assert way_out in message.replace("torch.optim.Optimizer", "").replace(module, "")


def test_a_head_that_is_no_linear_layer_is_named_in_full() -> None:
    class Linear(nn.Module):
        """Keras's dense layers, say: the weight is [in, out]."""

        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.kernel

    Linear.__module__, Linear.__qualname__ = "some.package.layers", "Linear"
    model: Any = net()
    model.head = Linear().double()
    with pytest.raises(TypeError, match=re.escape("some.package.layers.Linear")):
        primum.attach(model, sgd(model), head="head")


def test_at_most_three_candidates_and_the_likely_one_first() -> None:
    layers = [nn.Linear(6, 6) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(6, 4))
    with pytest.raises(ValueError, match="head=") as caught:
        primum.attach(model, optim.SGD(model.parameters(), lr=0.1), head="heaad")
    listed = re.findall(r"(\d+) \(6 -> \d\)", str(caught.value))
    assert 1 <= len(listed) <= 3
    assert listed[0] == "6"


class GraphLinear(nn.Module):
    """As PyG's `Linear`: no nn.Linear, but the same weight, bias and output."""

    def __init__(self, source: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.in_channels, self.out_channels = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * F.linear(x, self.weight, self.bias)


GraphLinear.__module__, GraphLinear.__qualname__ = "torch_geometric.nn.dense.linear", "Linear"


@pytest.mark.parametrize("head", ["head", None], ids=["given", "found"])
def test_a_layer_that_behaves_as_a_linear_one_is_accepted(head: str | None) -> None:
    found = []
    for kind in (nn.Linear, GraphLinear):
        model: Any = net()
        if kind is GraphLinear:
            model.head = GraphLinear(model.head)
        reducer = primum.attach(model, sgd(model), head=head)
        inputs, labels = batch(0, 12)
        F.cross_entropy(model(inputs), labels).backward()
        found.append((report_of(reducer).extra_weights, gradients(model)))
    (w, expected), (v, actual) = found
    assert w.max() > 0.05
    assert torch.equal(v, w)
    assert_equal(actual, expected)


def test_a_layer_whose_output_is_another_stays_plain() -> None:
    """It looks like a linear layer; its output in the first pass shows that it is none."""
    model: Any = net()
    model.head = GraphLinear(model.head, factor=3.0)
    optimizer = sgd(model)
    inputs, labels = batch(0, 12)
    expected = plain_gradients(model, lambda twin: F.cross_entropy(twin(inputs), labels))
    with warned() as messages:
        try:
            primum.attach(model, optimizer, head="head")
        except (TypeError, ValueError) as error:  # seen when attaching: as good
            refused = str(error)
        else:
            refused = ""
            F.cross_entropy(model(inputs), labels).backward()
    if refused:
        assert "torch_geometric.nn.dense.linear.Linear" in refused
        return
    assert_equal(gradients(model), expected)
    assert len(messages) == 1


@pytest.mark.parametrize("name", ["RewardTrainer", "DPOTrainer"])
def test_trainers_whose_loss_is_over_pairs_are_refused_by_name(name: str) -> None:
    """Only the loss outside the model shows that rows are chosen and rejected answers."""
    integration = pytest.importorskip("primum.integrations.transformers")
    trainer = alien(name, f"trl.trainer.{name[:-7].lower()}_trainer")()
    trainer.callback_handler = type("Handler", (), {"callbacks": []})()
    with pytest.raises((TypeError, ValueError), match=name):
        integration.PrimumCallback().add_to(trainer)


def test_the_explicit_form_takes_losses_of_questions() -> None:
    """Four questions, twelve rows of choices: the way out that the refusal of the hook names."""
    model = net(1, lambda logits, _: logits.view(4, 3))
    reducer = primum.attach(model, sgd(model), head="head")
    inputs, labels = batch(0, 12)
    losses = F.cross_entropy(model(inputs), labels[:4] % 3, reduction="none")
    reducer(losses).backward()
    report = report_of(reducer)
    assert report.extra_weights.shape == (4,)
    reducer.remove()
    found = gradients(model)
    losses = F.cross_entropy(model(inputs), labels[:4] % 3, reduction="none")
    expected = torch.autograd.grad(
        ((1 + report.extra_weights) * losses).mean(), list(model.parameters())
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
