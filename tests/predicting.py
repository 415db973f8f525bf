"""The prediction of a head's step, for a gradient that is given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.kernel.head import Head, NoScale
from primum.kernel.optimizers.predict import Update
from primum.kernel.scalars import Scalar


class Factor(NoScale):
    """A loop that multiplies gradients by one number, and their accumulated sum by another."""

    def __init__(self, value: Scalar, unscaled: Tensor | None = None) -> None:
        self.value, self.unscaled = value, unscaled

    def unscale(self, gradient: Tensor) -> Tensor | None:
        return self.unscaled

    def factor(self, part: str) -> Scalar:
        return self.value


def predict_head(
    layer: nn.Linear,
    optimizers: Mapping[str, Optimizer],
    grad: Tensor,
    *,
    factor: Scalar | None = None,
    rows: slice | None = None,
) -> Update:
    """The update if the loop multiplies this total gradient by a factor."""
    head = Head(layer, optimizers, scale=NoScale() if factor is None else Factor(factor))
    return head.predict(head.parts(), grad, rows)
