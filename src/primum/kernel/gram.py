"""The Gram operator `G diag(gain) G^T` of a linear head, without the per-sample gradients G.

Row i of G is the gradient of sample i's loss with respect to the head's weight and bias: the outer
product of the gradient at the head's output and of its input with a one for the bias, summed over
positions where a sample has several (a sequence, a feature map).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from primum.kernel.scalars import Scalar, is_one, on_host

LAUNCH = 200_000  # What one more operation costs, in floating-point operations of a matrix product.


class Gram:
    """A symmetric positive semi-definite operator over the samples of a batch. [B, B].

    Attributes:
        diagonal: Squared norms of the samples' gradients in the metric of the gain. [B].
        all_reduce: Sums a tensor over ranks that hold some of the samples each; None if all are
            here. Otherwise vectors are those of this rank's samples, a product is a collective
            operation, and all ranks must make the same number of them.
        samples: How many there are on all ranks; None if all are here.
    """

    diagonal: Tensor
    all_reduce: Callable[[Tensor], Tensor] | None = None
    samples: int | None = None

    def times(self, vector: Tensor) -> Tensor:
        """`gram @ vector`. [B] -> [B]."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Gram:
        """The operator of gradients times `factor`."""
        raise NotImplementedError

    def over_all(self, *sums: Tensor) -> Sequence[Tensor]:
        """Sums over the samples that are here -> over the samples of all ranks."""
        return sums if self.all_reduce is None else self.all_reduce(torch.stack(sums)).unbind()


class Dense(Gram):
    """The operator as a matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.diagonal = matrix.diagonal()

    def times(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def scaled(self, factor: float) -> Gram:
        return Dense(self.matrix * factor**2)


class MatrixFree(Gram):
    """The operator applied by two products of the head's size: exact for any gain, no B x B.

    Attributes:
        features: The head's input, with a last column of ones if it has a bias. [B, d] or
            [B, T, d].
        output_gradients: Of the same leading shape. [B, d_out] or [B, T, d_out].
        gain: A number, a scalar tensor, [1, d] if the same for all outputs, or [d_out, d].
        has_bias: Whether the last column of the features stands for the bias.
    """

    def __init__(
        self,
        features: Tensor,
        output_gradients: Tensor,
        gain: Scalar = 1.0,
        *,
        has_bias: bool = False,
        transposed: Tensor | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        samples: int | None = None,
    ) -> None:
        self.features, self.output_gradients, self.gain = features, output_gradients, gain
        self.has_bias, self.all_reduce, self.samples = has_bias, all_reduce, samples
        self._flat = features.flatten(0, -2)
        self._gradients = output_gradients.flatten(0, -2)
        self._gradients_t = self._gradients.t() if transposed is None else transposed
        self._diagonal: Tensor | None = None

    @property
    def positions(self) -> int:
        """Of each sample; 1 if it has no such dimension."""
        return 1 if self.features.dim() == 2 else self.features.shape[1]

    @property
    def uniform_gain(self) -> bool:
        return not isinstance(self.gain, Tensor) or self.gain.dim() == 0

    @property
    def factorises(self) -> bool:
        """Whether the matrix is an elementwise product of two small ones."""
        by_input = isinstance(self.gain, Tensor) and self.gain.dim() == 2 and len(self.gain) == 1
        return self.features.dim() == 2 and (self.uniform_gain or by_input)

    @property
    def diagonal(self) -> Tensor:  # type: ignore[override]
        if self._diagonal is None:  # a cached_property takes a lock, which compilers do not trace
            self._diagonal = self._squares()
        return self._diagonal

    def _squares(self) -> Tensor:
        if self.features.dim() == 3:  # the square of a sum over positions: no shortcut
            total = self.features.new_zeros(len(self.features))
            for block in self.by_output():
                total += block.square().sum(1)
            return total
        x2, g2 = self.features.square(), self.output_gradients.square()
        if self.factorises:
            return (x2 * self.gain).sum(1) * g2.sum(1)
        return ((g2 @ self.gain) * x2).sum(1)

    def times(self, vector: Tensor) -> Tensor:
        rows = vector if self.positions == 1 else vector.repeat_interleave(self.positions)
        g_t, x = self._gradients_t, self._flat
        if on_host(rows) and not torch.compiler.is_compiling():  # rows of zeros add nothing
            support = rows.nonzero().squeeze(1)  # no sync there
            if 2 * len(support) < len(rows):
                g_t, x, rows = g_t[:, support], x[support], rows[support]
        total = (g_t * rows) @ x
        if self.all_reduce is not None:
            total = self.all_reduce(total)
        return self.along(total if is_one(self.gain) else total * self.gain)

    def scaled(self, factor: float) -> Gram:
        return MatrixFree(self.features, self.output_gradients * factor, self.gain)

    def along(self, displacement: Tensor) -> Tensor:
        """`G @ displacement`: each sample's first-order loss change. [d_out, d] -> [B]."""
        moved = ((self._gradients @ displacement) * self._flat).sum(1)
        return moved if self.positions == 1 else moved.view(-1, self.positions).sum(1)

    def dense(self) -> Dense:
        """The same as a matrix, exactly.

        Where it factorises this is the paper's route (App. B, with the all-ones matrix where it
        prints the identity). Elsewhere the gradients are formed a few outputs at a time: memory
        stays bounded and, unlike the paper's low-rank gain, nothing is approximated.
        """
        if self.factorises:
            x, g = self.features, self.output_gradients
            scaled = x if is_one(self.gain) else x * self.gain
            return Dense((scaled @ x.t()).mul_(g @ g.t()))
        matrix = self.features.new_zeros(len(self.features), len(self.features))
        for block in self.by_output():
            matrix.addmm_(block, block.t())
        return Dense(matrix)

    def by_output(self) -> Iterator[Tensor]:
        """`G * sqrt(gain)` for successive blocks of outputs. Yields [B, outputs * d]."""
        root = self.gain**0.5
        whole = not isinstance(root, Tensor) or root.dim() == 0 or len(root) == 1
        for rows in sample_blocks(self.features, self.output_gradients):
            first, width = rows.start, rows.stop - rows.start
            block = per_sample(self.features, self.output_gradients.narrow(-1, first, width))
            yield block.mul_(root if whole else root.narrow(0, first, width)).flatten(1)


def per_sample(features: Tensor, output_gradients: Tensor) -> Tensor:
    """The samples' gradients of some outputs. [B, d], [B, n] or [B, T, .] -> [B, n, d]."""
    if features.dim() == 2:
        return output_gradients.unsqueeze(2) * features.unsqueeze(1)
    return output_gradients.transpose(1, 2) @ features


def sample_blocks(features: Tensor, output_gradients: Tensor) -> Iterator[slice]:
    """Ranges of outputs whose per-sample gradients are held at a time.

    Backward holds the gradients of the output and of the weight anyway.
    """
    outputs, inputs = output_gradients.shape[-1], features.shape[-1]
    held = output_gradients.numel() + inputs * outputs
    return output_blocks(outputs, len(features) * inputs, held)


def output_blocks(outputs: int, each: int, held: int) -> Iterator[slice]:
    """Ranges of outputs that take `each` entries, where `held` entries are in memory anyway.

    A block takes at most 4 MiB in float32, or a sixteenth of what is held.
    """
    width = max(1, max(1 << 20, held // 16) // each)
    for first in range(0, outputs, width):
        yield slice(first, min(first + width, outputs))


def choose_form(gram: MatrixFree, products: int) -> Gram:
    """The cheaper of the two exact forms, if it is to be applied about `products` times."""
    sides = gram.features.shape[-1], gram.output_gradients.shape[-1]
    dense, free = operations(
        len(gram.features), gram.positions, *sides, products=products, factorises=gram.factorises
    )
    return gram.dense() if dense <= free else gram


def operations(
    batch: int, positions: int, inputs: int, outputs: int, *, products: int, factorises: bool
) -> tuple[int, int]:
    """Floating-point operations of the dense and of the matrix-free form. The cost model.

    Memory-bound operations count eight times, and each operation costs its launch, which decides
    for small heads. `lab/bench/gram.py` times both forms over many sizes.
    """
    square, size = batch * batch, inputs * outputs
    if factorises and positions == 1:
        build = square * (2 * (inputs + outputs) + 16)
    else:
        build = 2 * batch * size * (positions + batch + 8)
    dense = build + products * (8 * square + LAUNCH)
    return dense, products * (4 * batch * positions * size + 6 * LAUNCH)
