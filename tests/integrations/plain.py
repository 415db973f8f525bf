"""What every framework must reproduce: plain PyTorch with the one added line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import primum

BATCH = 24
STEPS = 10
FIGURES = {
    "primum/harm_before",
    "primum/harm_after",
    "primum/harmed_before",
    "primum/harmed_after",
    "primum/mean_extra_weight",
    "primum/gap",
    "primum/fallbacks",
    "primum/discarded",
    "primum/applied",
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: AdamW(params, lr=0.01, weight_decay=0.05),
}


def dataset(rows: int = BATCH * STEPS) -> TensorDataset:
    """Three classes that overlap: some sample is harmed in every batch."""
    rng = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (rows,), generator=rng)
    centres = torch.randn(3, 6, generator=rng)
    return TensorDataset(centres[labels] + 2 * torch.randn(rows, 6, generator=rng), labels)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
) -> None:
    inputs, labels = dataset().tensors
    model.train()
    for _ in range(epochs):
        batches = zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
        for number, (some, targets) in enumerate(batches, 1):
            (F.cross_entropy(model(some), targets) / accumulate).backward()
            if number % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()


def trained(kind: str, settings: dict[str, Any] | None, **loop: Any) -> dict[str, Tensor]:
    """Parameters after a run; `settings` are those of `attach`, None is training without it."""
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    if settings is not None:
        primum.attach(model, optimizer, **settings)
    train(model, optimizer, **loop)
    return model.state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)
