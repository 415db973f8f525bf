"""Models, batches and slow references that the tests in this folder share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class Net(nn.Module):
    """A body and a head; `finish` makes the output of the head's and of the features."""

    def __init__(self, outputs: int = 4, finish: Callable[[Tensor, Tensor], Any] | None = None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, outputs)
        self.finish = finish

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        logits = self.head(features)
        return logits if self.finish is None else self.finish(logits, features)


def net(
    outputs: int = 4, finish: Callable[[Tensor, Tensor], Any] | None = None, seed: int = 0
) -> Net:
    """The same one, in float64, for the same seed."""
    torch.manual_seed(seed)
    return Net(outputs, finish).double()


def batch(number: int, *shape: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs of the given leading shape, and labels that have nothing to do with them."""
    rng = torch.Generator().manual_seed(1000 + number)
    inputs = torch.randn(*shape, 6, generator=rng, dtype=torch.float64)
    return inputs, torch.randint(classes, shape, generator=rng)


def sgd(model: nn.Module) -> optim.SGD:
    """With a momentum of noise, so that the next step harms some samples whatever the batch."""
    optimizer = optim.SGD(model.parameters(), **SGD)
    rng = torch.Generator().manual_seed(7)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=rng, dtype=torch.float64)
        optimizer.state[param]["momentum_buffer"] = noise.to(param.dtype)
    return optimizer


def solver(**settings: Any) -> dict[str, Any]:
    """Arguments of `attach` for these settings of the solver."""
    recipe = getattr(primum, "Primum", None)
    return settings if recipe is None else {"recipe": recipe(**settings)}


def report_of(reducer: primum.Reducer) -> primum.StepReport:
    assert reducer.last is not None
    return reducer.last


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain_gradients(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> list[Tensor | None]:
    """Of a copy that primum does not know, by the loss that `run` computes."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    run(twin).backward()
    return gradients(twin)


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def relative_error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Of all gradients as one vector."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    apart = torch.cat([(a - b).flatten() for a, b in pairs if b is not None])
    return float(apart.norm() / torch.cat([b.flatten() for _, b in pairs if b is not None]).norm())


def rows_of_gradients(losses: Tensor, params: Sequence[Tensor]) -> Tensor:
    """G: the gradient of each sample's `loss / B`, one at a time. [B] -> [B, parameters]."""
    rows = []
    for loss in losses / len(losses):
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        rows.append(torch.cat([each.flatten() for each in grads]))
    return torch.stack(rows)


def train(
    model: nn.Module, optimizer: optim.Optimizer, steps: int, *, rows: int = 24, first: int = 0
) -> None:
    """Plain classification."""
    dtype = next(model.parameters()).dtype
    for number in range(first, first + steps):
        inputs, labels = batch(number, rows)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(dtype)), labels).backward()
        optimizer.step()


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collects what primum warns of in the block, instead of raising it."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages.extend(str(each.message) for each in caught if "primum" in str(each.message))
