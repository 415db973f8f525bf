"""Per-sample gradients the slow way: one backward pass per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def per_sample_gradients(
    model: Callable[[Tensor], Tensor], params: list[nn.Parameter], inputs: Tensor, targets: Tensor
) -> Tensor:
    """G: row i is the gradient of `cross_entropy_i / B`, all `params` side by side. [B, D]."""
    rows = []
    for i in range(len(inputs)):
        loss = nn.functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
        parts = torch.autograd.grad(loss / len(inputs), params)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)
