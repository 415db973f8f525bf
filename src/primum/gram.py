"""3 - The Gram operator `G diag(gain) G^T` of a linear head, without the per-sample gradients G.

Row i of G is the gradient of sample i's loss with respect to the head's weight and bias: the outer
product of the gradient at the head's output and of its input with a one for the bias, summed over
positions where a sample has several (a sequence, a feature map).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

# Entries of per-sample gradients held at a time where they have to be formed: 16 MiB in float32.
CHUNK_ENTRIES = 1 << 22

LAUNCH = 200_000  # What one more operation costs, in floating-point operations of a matrix product.


class Gram(Protocol):
    """A symmetric positive semi-definite B x B operator."""

    diagonal: Tensor

    def times(self, vector: Tensor) -> Tensor:
        """`gram @ vector`. [B] -> [B]."""
        ...

    def scaled(self, scale: Tensor) -> Gram:
        """`diag(scale) gram diag(scale)`; its diagonal is not to be used. [B]."""
        ...


@dataclass(frozen=True)
class Head:
    """A linear head's share of one backward pass.

    Shapes: features [B, d] or [B, T, d], where d counts a last column of ones if the head has a
    bias; output_gradients [B, d_out] or [B, T, d_out]; gain a number, a scalar tensor or
    [d_out, d].
    """

    features: Tensor
    output_gradients: Tensor
    gain: Tensor | float
    has_bias: bool = False
    transposed: Tensor | None = None  # output gradients of all positions, if at hand

    @property
    def uniform_gain(self) -> bool:
        return not isinstance(self.gain, Tensor) or self.gain.dim() == 0

    @property
    def factorises(self) -> bool:
        """Whether the matrix is an elementwise product of two small ones."""
        return self.uniform_gain and self.features.dim() == 2

    @cached_property
    def gradients_t(self) -> Tensor:
        """Output gradients of all positions. [d_out, B * T]."""
        if self.transposed is not None:
            return self.transposed
        return self.output_gradients.flatten(0, -2).t()

    @cached_property
    def root_gain(self) -> Tensor | float:
        return self.gain**0.5

    def along(self, displacement: Tensor) -> Tensor:
        """`G @ displacement`: each sample's first-order loss change. [d_out, d] -> [B]."""
        moved = (self.output_gradients @ displacement) * self.features
        return moved.sum(1) if moved.dim() == 2 else moved.sum((1, 2))


class Dense:
    """The operator as a matrix. [B, B]."""

    def __init__(self, matrix: Tensor, scale: Tensor | None = None) -> None:
        self.matrix = matrix
        self._scale = scale
        if scale is None:
            self.diagonal = matrix.diagonal()

    def times(self, vector: Tensor) -> Tensor:
        if self._scale is None:
            return self.matrix @ vector
        return (self.matrix @ (vector * self._scale)) * self._scale

    def scaled(self, scale: Tensor) -> Dense:
        return Dense(self.matrix, scale)


class MatrixFree:
    """The operator applied by two products of the head's size: exact for any gain, no B x B."""

    def __init__(self, head: Head, scale: Tensor | None = None) -> None:
        self._head = head
        self._positions = 1 if head.features.dim() == 2 else head.features.shape[1]
        self._features = head.features.flatten(0, -2)
        self._gradients_t = head.gradients_t
        if scale is None:
            self.diagonal = diagonal_of(head)
            self._gradients = head.output_gradients.flatten(0, -2)
        else:
            self._gradients_t = self._gradients_t * self._rows(scale)
            self._gradients = self._gradients_t.t()

    def _rows(self, vector: Tensor) -> Tensor:
        return vector if self._positions == 1 else vector.repeat_interleave(self._positions)

    def times(self, vector: Tensor) -> Tensor:
        displacement = self._sum(self._rows(vector)) * self._head.gain
        product = ((self._gradients @ displacement) * self._features).sum(1)
        return product if self._positions == 1 else product.view(-1, self._positions).sum(1)

    def _sum(self, rows: Tensor) -> Tensor:
        """`G^T rows`, the samples' gradients summed. [B * T] -> [d_out, d]."""
        return (self._gradients_t * rows) @ self._features

    def scaled(self, scale: Tensor) -> MatrixFree:
        return MatrixFree(self._head, scale)


def matrix_of(head: Head) -> Tensor:
    """The exact matrix. [B, B].

    Where it factorises this is the paper's route (App. B, with the all-ones matrix where it prints
    the identity). Elsewhere the gradients are formed a few outputs at a time: memory stays bounded
    and, unlike the paper's low-rank gain, nothing is approximated.
    """
    if head.factorises:
        x, g = head.features, head.output_gradients
        return (x @ x.t()).mul_(g @ g.t()).mul_(head.gain)
    parts = _gradients_by_output(head)
    part = next(parts)
    matrix = part @ part.t()
    for part in parts:
        matrix.addmm_(part, part.t())
    return matrix


def diagonal_of(head: Head) -> Tensor:
    """Squared norms of the samples' gradients in the metric of the gain. [B]."""
    if head.features.dim() == 3:  # the square of a sum over positions: no shortcut
        total = head.features.new_zeros(len(head.features))
        for part in _gradients_by_output(head):
            total += part.square().sum(1)
        return total
    x2, g2 = head.features.square(), head.output_gradients.square()
    if head.uniform_gain:
        return x2.sum(1) * g2.sum(1) * head.gain
    return ((g2 @ head.gain) * x2).sum(1)


def _gradients_by_output(head: Head) -> Iterator[Tensor]:
    """`G * sqrt(gain)` for successive blocks of outputs. Yields [B, outputs * d]."""
    x, g, root = head.features, head.output_gradients, head.root_gain
    outputs = g.shape[-1]
    width = max(1, CHUNK_ENTRIES // (len(x) * x.shape[-1]))
    for first in range(0, outputs, width):
        if width < outputs:
            g = head.output_gradients[..., first : first + width]
            if isinstance(head.root_gain, Tensor) and head.root_gain.dim():
                root = head.root_gain[first : first + width]
        gradients = g.unsqueeze(2) * x.unsqueeze(1) if x.dim() == 2 else g.transpose(1, 2) @ x
        yield gradients.mul_(root).flatten(1)


def choose(head: Head, products: int) -> Gram:
    """The cheaper of the two exact forms, if it is to be applied about `products` times."""
    batch, inputs = len(head.features), head.features.shape[-1]
    positions = 1 if head.features.dim() == 2 else head.features.shape[1]
    outputs = head.output_gradients.shape[-1]
    if dense_is_cheaper(
        batch, positions, inputs, outputs, products=products, factorises=head.factorises
    ):
        return Dense(matrix_of(head))
    return MatrixFree(head)


def dense_is_cheaper(
    batch: int, positions: int, inputs: int, outputs: int, *, products: int, factorises: bool
) -> bool:
    """Compare floating-point operations; what is bound by memory counts eight times.

    Each operation also costs its launch, which decides for small heads. `benchmarks/routes.py`
    times both forms over many sizes and shows where this errs.
    """
    square, size = batch * batch, inputs * outputs
    if factorises:
        build = square * (2 * (inputs + outputs) + 16)
    else:
        build = 2 * batch * size * (positions + batch + 8)
    dense = build + products * (8 * square + LAUNCH)
    free = products * (4 * batch * positions * size + 6 * LAUNCH)
    return dense <= free
