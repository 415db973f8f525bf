"""From blocks of the gradient at the head's output to a recipe's arguments.

What `pipeline.py` does with the gradient at all outputs, for one that is computed a few outputs at
a time and again when it is needed (`streamed.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import Gain, Gram
from primum.monitor import Plain
from primum.pipeline import Arguments, Captured
from primum.pipeline import _maximises as maximises
from primum.pipeline import _predict as predict_rows
from primum.recipe import Recipe
from primum.rules import Scalar, columns
from primum.streamed import Gradients, Streamed, visit
from primum.update import Update, sliceable


class Streaming(Gram):
    """The exact operator, whose products compute the gradient at the output again.

    Args:
        source: Head, features and targets.
        gains: By block of outputs. See `gram.MatrixFree`.
        squares: The diagonal. [B].
        positions: Tokens of a sample.
        unscale: Undoes the loss scaling of the gradients; None if there is none.
        has_bias: Whether the bias is trained.
    """

    def __init__(
        self,
        source: Streamed,
        gains: Mapping[int, Gain],
        squares: Tensor,
        positions: int,
        unscale: Tensor | None,
        *,
        has_bias: bool,
    ) -> None:
        self.diagonal = squares
        self._source, self._gains, self._positions = source, gains, positions
        self._unscale, self._has_bias = unscale, has_bias

    def times(self, vector: Tensor) -> Tensor:
        rows = vector.repeat_interleave(self._positions) if self._positions > 1 else vector
        total = torch.zeros_like(rows)

        def look(outputs: slice, found: Tensor) -> None:
            g = found if self._unscale is None else found * self._unscale
            moved = _gradient(self._source, g.t() * rows, self._has_bias)
            total.add_(along(self._source, g, moved * self._gains[outputs.start]))

        visit(self._source, None, look)
        return by_sample(total, self._positions)


def measure(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    source: Streamed,
    captured: Captured,
    recipe: Recipe,
    positions: int,
    plain: Gradients,
) -> tuple[Arguments, float]:
    """What a recipe takes, as `pipeline.arguments`, and the seconds spent on it.

    Fills the plain gradients on the way. `captured` has no gradients, but what is known about them;
    each sample has `positions` tokens.
    """
    owners = {part: owner for part, owner in owners.items() if getattr(head, part).requires_grad}
    if recipe.products == 0 and getattr(recipe, "radius", None) != 0:
        raise Plain(
            f"recipe {recipe.name!r} needs the gradients at the head's output all at once, which a "
            "fused loss does not keep in memory; call the head, or use the default recipe"
        )
    made = _Measured(head, owners, source, captured, recipe, plain)
    if sliceable(owners):
        visit(source, plain, made.look)
    else:  # the step of some outputs depends on the gradients of all
        visit(source, plain)
        made.whole = predict_rows(head, owners, made.plain_gradient(slice(None)), captured)
        visit(source, None, made.look)
    drift, squares = by_sample(made.drift, positions), by_sample(made.squares, positions)
    if positions > 1 and recipe.products:  # the square of a sum over positions: no shortcut
        squares = made.squares_of_sums(positions)
    gram = Streaming(
        source, made.gains, squares, positions, captured.unscale, has_bias="bias" in owners
    )
    drift = -drift if maximises(head, owners) else drift
    return (gram, drift, made.square.sqrt(), made.lr), made.seconds


class _Measured:
    """Sums over blocks of outputs."""

    def __init__(
        self,
        head: nn.Linear,
        owners: Mapping[str, Optimizer],
        source: Streamed,
        captured: Captured,
        recipe: Recipe,
        plain: Gradients,
    ) -> None:
        self._head, self._owners, self._source = head, owners, source
        self._captured, self._recipe, self._plain = captured, recipe, plain
        self.whole: Update | None = None
        self.drift = source.features.new_zeros(len(source.features), dtype=source.wide)
        self.squares, self.square = self.drift.clone(), self.drift.new_zeros(())
        self.lr: Scalar = 0.0
        self.gains: dict[int, Gain] = {}
        self.seconds = 0.0

    def look(self, rows: slice, found: Tensor) -> None:
        began = time.perf_counter()
        g = found if self._captured.unscale is None else found * self._captured.unscale
        update = self._update(rows)
        self.drift += along(self._source, g, update.step)
        self.square += update.size(self._recipe.metric).square()
        self.lr = update.lr
        if self._recipe.products:
            self.gains[rows.start] = update.gain
            self.squares += self._squares(g.square(), update.gain)
        self.seconds += time.perf_counter() - began

    def plain_gradient(self, rows: slice) -> Tensor:
        """Of the loss alone, unscaled: weight and bias side by side. -> [n, d]."""
        assert self._plain.weight is not None
        grad = self._plain.weight[rows].to(self._source.wide)
        if "bias" in self._owners:
            assert self._plain.bias is not None
            grad = columns(grad, self._plain.bias[rows].to(grad))
        unscale = self._captured.unscale
        return grad if unscale is None else grad * unscale

    def _update(self, rows: slice) -> Update:
        if self.whole is None:
            grad = self.plain_gradient(rows)
            return predict_rows(self._head, self._owners, grad, self._captured, rows)
        gain = self.whole.gain
        by_output = isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1
        own = gain[rows] if by_output else gain  # type: ignore[index]
        return Update(self.whole.step[rows], own, self.whole.lr)

    def _squares(self, g2: Tensor, gain: Gain) -> Tensor:
        """Squared norms of the tokens' gradients at some outputs. [N, n] -> [N]."""
        x2 = self._source.features.to(self.drift).square()
        if "bias" in self._owners:
            x2 = nn.functional.pad(x2, (0, 1), value=1.0)
        if not isinstance(gain, Tensor) or gain.dim() == 0:
            return x2.sum(1) * g2.sum(1) * gain
        return (g2 * (x2 @ gain.t())).sum(1)

    def squares_of_sums(self, positions: int) -> Tensor:
        """Squared norms of the samples' gradients, summed over their positions first. -> [B]."""
        has_bias = "bias" in self._owners
        x = self._source.features.to(self.drift)
        x = nn.functional.pad(x, (0, 1), value=1.0) if has_bias else x
        x = x.view(-1, positions, x.shape[1])
        total = self.drift.new_zeros(len(x))

        def look(rows: slice, found: Tensor) -> None:
            unscale = self._captured.unscale
            g = found if unscale is None else found * unscale
            for each in range(len(x)):  # one sample at a time: [n, d] and no more
                own = g[each * positions : (each + 1) * positions].t() @ x[each]
                total[each] += (own.square() * self.gains[rows.start]).sum()

        visit(self._source, None, look)
        return total


def along(source: Streamed, g: Tensor, displacement: Tensor) -> Tensor:
    """Change of each token's loss if some outputs move. g [N, n], displacement [n, d] -> [N]."""
    has_bias = displacement.shape[1] > source.features.shape[1]
    bias = displacement[:, -1] if has_bias else None
    weight = displacement[:, :-1] if has_bias else displacement
    return (nn.functional.linear(source.features.to(g), weight, bias) * g).sum(1)


def _gradient(source: Streamed, g_t: Tensor, has_bias: bool) -> Tensor:
    """Of weight and bias, side by side. [n, N] -> [n, d]."""
    weight = g_t @ source.features.to(g_t)
    return columns(weight, g_t.sum(1)) if has_bias else weight


def by_sample(tokens: Tensor, positions: int) -> Tensor:
    """Sums over the positions of each sample. [B * T] -> [B]."""
    return tokens if positions == 1 else tokens.view(-1, positions).sum(1)
