"""A head that no longer makes the output, or never did: said within a few steps, with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, batch, report_of

PATIENCE = 5  # optimizer steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.backbone(x))
        return output


class LeftOver(Net):
    """Has a layer under a usual name that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(0.1 * torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x) @ self.projection.t()


class Fused(Net):
    """Uses its head's weight without calling the head."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.backbone(x), self.classifier.weight, self.classifier.bias)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def said_once(action: Callable[[], object], *names: str) -> None:
    """One warning of ours in all of `action`, with these names in it."""
    with pytest.warns(RuntimeWarning) as caught:
        action()
    ours = [str(each.message) for each in caught if "primum" in str(each.message)]
    assert len(ours) == 1, ours
    assert all(name in ours[0] for name in names), ours


def replace(model: Net) -> Iterable[nn.Parameter]:
    """A head for another task, as in transfer learning."""
    model.classifier = nn.Linear(8, 4).double()
    return model.classifier.parameters()


@pytest.mark.parametrize("trained_before", [0, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["reducer kept", "reducer not kept"])
def test_replaced_under_the_same_optimizer(trained_before: int, kept: bool) -> None:
    model = Net().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, trained_before)
    if not kept:
        del reducer
    optimizer.add_param_group({"params": list(replace(model))})
    said_once(lambda: train(model, optimizer, PATIENCE), "classifier")
    train(model, optimizer, 3 * PATIENCE)  # and not again


@pytest.mark.parametrize("trained_before", [0, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["reducer kept", "reducer not kept"])
def test_replaced_with_a_new_optimizer(trained_before: int, kept: bool) -> None:
    model = Net().double()
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, trained_before)
    if not kept:
        del reducer
    replace(model)
    optimizer = optim.AdamW(model.parameters(), **ADAMW)
    said_once(lambda: train(model, optimizer, PATIENCE), "classifier")
    train(model, optimizer, 3 * PATIENCE)


@pytest.mark.parametrize("same_optimizer", [True, False])
def test_the_way_out(same_optimizer: bool) -> None:
    """Attach once more after replacing: no warning, and the new head is weighed."""
    model = Net().double()
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), **SGD)
    primum.attach(model, optimizer)
    train(model, optimizer, 3)
    parameters = list(replace(model))
    if same_optimizer:
        optimizer.add_param_group({"params": parameters})
    else:
        optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2 * PATIENCE)
    assert reducer.head is model.classifier
    assert report_of(reducer).applied


@pytest.mark.parametrize("kind", [LeftOver, Fused])
def test_never_called(kind: type[Net]) -> None:
    model = kind().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer, head="classifier")
    said_once(lambda: train(model, optimizer, PATIENCE), "classifier")
    train(model, optimizer, 3 * PATIENCE)
    assert reducer.last is None


def test_an_unused_head_in_a_model_that_is_attached_elsewhere() -> None:
    """Nothing to say: the layer that is weighed is called."""
    model = LeftOver().double()
    model.head = nn.Linear(4, 4).double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer, head="head")
    for number in range(2 * PATIENCE):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(model.head(model(inputs)), labels).backward()
        optimizer.step()
    assert report_of(reducer).applied
