"""What the tests of the reducer share: a small model, batches, gradients, a training loop."""

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from primum import Primum, Problem, Reducer, Solution, StepReport, solve
from primum.kernel.recipe import RADIUS

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
PRECISE: dict[str, Any] = {"recipe": Primum(max_iters=20, tolerance=0.0)}
BOTH = pytest.mark.parametrize(
    ("kind", "options"), [(optim.SGD, SGD), (optim.AdamW, ADAMW)], ids=["SGD", "AdamW"]
)


class Widen(nn.Module):
    """Gives the head float32, of which autocast makes a copy, and keeps none itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.float()


def make(
    kind: type[optim.Optimizer] = optim.SGD,
    options: dict[str, Any] = SGD,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[nn.Sequential, optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=bias)).to(dtype)
    return model, kind(model.parameters(), **options)


def batch(number: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs of the given leading shape and labels that have nothing to do with them."""
    rng = torch.Generator().manual_seed(1000 + number)
    inputs = torch.randn(*shape, 6, generator=rng, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(4, shape, generator=rng)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def train(
    model: nn.Module, optimizer: optim.Optimizer, steps: int, first: int = 0, rows: int = 24
) -> None:
    dtype = next(model.parameters()).dtype
    for number in range(first, first + steps):
        inputs, labels = batch(number, rows, dtype=dtype)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def report_of(reducer: Reducer) -> StepReport:
    assert reducer.last is not None
    return reducer.last


def stir(optimizer: optim.Optimizer) -> None:
    """Replace what the optimizer remembers by noise: steps that harm, whatever the batch."""
    rng = torch.Generator().manual_seed(0)
    for state in optimizer.state.values():
        for key in {"momentum_buffer", "exp_avg", "m"} & state.keys():
            noise = torch.randn(state[key].shape, generator=rng, dtype=torch.float64)
            state[key] = 3 * noise.to(state[key].dtype)


def make_like(
    model: nn.Sequential, optimizer: optim.Optimizer
) -> tuple[nn.Sequential, optim.Optimizer]:
    """A copy of both that belong together, with what has accumulated in `.grad`."""
    twin, stepper = copy.deepcopy((model, optimizer))
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        one.grad = None if other.grad is None else other.grad.clone()
    return twin, stepper


def slow_solution(
    model: nn.Sequential,
    optimizer: optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    scale: float = 1.0,
) -> Solution:
    """Extra weights from per-sample gradients formed one by one and from a step really taken.

    Uses up `model` and `optimizer`: pass copies.
    """
    params = [p for p in model[2].parameters() if p.requires_grad]
    losses = F.cross_entropy(model(inputs), labels, reduction="none") / len(labels) * scale
    rows = []
    for loss in losses:
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        rows.append(torch.cat([each.flatten() for each in grads]))
    per_sample_gradients = torch.stack(rows)
    before = [p.detach().clone() for p in params]
    losses.sum().backward()
    optimizer.step()
    group = optimizer.param_groups[0]
    moves = [(p.detach() - old) / group["lr"] for p, old in zip(params, before, strict=True)]
    step = torch.cat([each.flatten() for each in moves])
    gain = torch.ones_like(step)
    if isinstance(optimizer, optim.AdamW):
        beta1, beta2 = group["betas"]
        t = optimizer.state[params[0]]["step"].item()
        square = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in params])
        gain = (1 - beta1) / (1 - beta1**t) / ((square / (1 - beta2**t)).sqrt() + group["eps"])
    gram = (per_sample_gradients * gain) @ per_sample_gradients.t()
    drift = per_sample_gradients @ step
    reach = RADIUS["sample"] * (step.square() / gain).sum().sqrt()
    return solve(Problem.dense(gram, drift, reach))


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: no number is read by the host; to look at one is an error."""

    def forbidden(tensor: Tensor) -> float:
        raise AssertionError("the host read a number")

    kernel = [f"kernel.{name}" for name in ("builder", "gram", "scalars", "solver")]
    for name in (*kernel, "guards.gradient_scale", "guards.watchers"):
        module = importlib.import_module(f"primum.{name}")
        monkeypatch.setattr(module, "on_host", lambda value: False)
        if hasattr(module, "read"):
            monkeypatch.setattr(module, "read", forbidden)
