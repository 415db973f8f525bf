"""Small models about to take a step, in float64, and the slow way to everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from primum.diagnostics import Probe

CLASSES, SIDE, ROWS = 4, 6, 16  # with 16 rows, every optimizer harms some sample

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=1e-2),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
by_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


class Tied(nn.Module):
    """Tokens in, the next token out: one matrix is both embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh().mean(1))


class Attention(nn.Module):
    """One transformer block; the head, which is defined first, runs last."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.position = nn.Parameter(torch.randn(SIDE, 8))
        self.block = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=dropout, batch_first=True, norm_first=True
        )

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(1, 2)[..., :1] * self.position
        return self.head(self.block(tokens).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, CLASSES),
    )  # fmt: skip


def frozen() -> nn.Module:
    model = cnn()
    model[3].weight.requires_grad_(False)
    model[7].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "frozen": frozen,
    "tied": Tied,
    "attention": Attention,
}
by_model = pytest.mark.parametrize("name", MODELS)


def batch_of(model: nn.Module, rows: int, number: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 + number)
    labels = torch.randint(CLASSES, (rows,), generator=rng)
    if isinstance(model, Tied):
        return torch.randint(CLASSES, (rows, 5), generator=rng), labels
    # Attention flattens [1, SIDE, SIDE] to SIDE tokens.
    return torch.randn(rows, 1, SIDE, SIDE, generator=rng, dtype=torch.float64), labels


def scene(
    name: str = "cnn", kind: str = "momentum", rows: int = ROWS, steps: int = 3, **options: Any
) -> Probe:
    """A model a few steps into training, so that the optimizer remembers something."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().double()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, steps)
    return Probe(model, optimizer, cross_entropy, *batch_of(model, rows), **options)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        inputs, labels = batch_of(model, 16, 1 + number)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    optimizer.zero_grad()


def loop_gradients(probe: Probe) -> dict[str, Tensor]:
    """Automatic differentiation, one sample at a time, of `L_i / B`. name -> [B, *shape]."""
    params = {n: p for n, p in probe.model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in params}
    for i in range(probe.batch_size):
        outputs = probe.model(probe.inputs[i : i + 1])
        loss = probe.loss(outputs, probe.targets[i : i + 1]).sum() / probe.batch_size
        gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for (name, param), gradient in zip(params.items(), gradients, strict=True):
            found[name].append(torch.zeros_like(param) if gradient is None else gradient)
    return {name: torch.stack(rows) for name, rows in found.items()}


def loop_losses(model: nn.Module, probe: Probe) -> Tensor:
    with torch.no_grad():
        return torch.stack(
            [
                probe.loss(model(probe.inputs[i : i + 1]), probe.targets[i : i + 1]).reshape(())
                for i in range(probe.batch_size)
            ]
        )


def really_stepped(probe: Probe, weights: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    """A deep copy of the model after a real step on `mean(weights * losses)`; how far it went."""
    model, optimizer = copy.deepcopy((probe.model, probe.optimizer))
    optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(probe.batch_size):
        loss = probe.loss(model(probe.inputs[i : i + 1]), probe.targets[i : i + 1]).sum()
        (weights[i] * loss / probe.batch_size).backward()
    optimizer.step()
    return model, {n: p.detach() - before[n] for n, p in model.named_parameters()}


def gain_of(optimizer: optim.Optimizer, param: Tensor, gradient: Tensor) -> Tensor:
    """d(step)/d(gradient) from the formulas of the paper (Sec. 4.4), state read before the step."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    if isinstance(optimizer, optim.SGD):
        return torch.ones_like(gradient) * (1 + group["momentum"] * group["nesterov"])
    b1, b2 = group["betas"]
    state = optimizer.state[param]
    t = float(state["step"]) + 1
    v = b2 * state["exp_avg_sq"] + (1 - b2) * gradient**2
    return (1 - b1) / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"])


def snapshot(probe: Probe) -> dict[str, Any]:
    """Everything that must stay as it is."""
    model, optimizer = probe.model, probe.optimizer
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "grads": [p.grad for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "rng": torch.get_rng_state(),
            "hooks": [
                (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
                for m in model.modules()
            ],
            "step hooks": len(optimizer._optimizer_step_post_hooks),
        }
    )


@contextmanager
def undisturbed(probe: Probe) -> Iterator[None]:
    """Also with gradients waiting in `.grad`, which nothing here may add to."""
    for param in probe.model.parameters():
        param.grad = torch.full_like(param, 3.0) if param.requires_grad else None
    before, where = snapshot(probe), [id(p) for p in probe.model.parameters()]
    yield
    torch.testing.assert_close(snapshot(probe), before, rtol=0, atol=0)
    assert where == [id(p) for p in probe.model.parameters()]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Relative to the largest entry: sums of float64 terms that may cancel."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
