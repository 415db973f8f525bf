"""From blocks of the gradient at the head's output to drift and extra weights.

What `pipeline.py` does with the gradient at all outputs, for one that is computed a few outputs at
a time and again when it is needed (`streamed.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.fallback import Plain
from primum.gram import Gain, Gram, MatrixFree, choose
from primum.pipeline import Captured, approximates, maximises, predict_total, trained_parts
from primum.problem import Solution
from primum.recipe import Recipe, approximated
from primum.rules import Scalar, columns
from primum.sketch import WIDTH, Factors, random_signs
from primum.streamed import FEW, Gradients, Streamed, visit
from primum.update import Update, sliceable


def weigh_streamed(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    source: Streamed,
    captured: Captured,
    recipe: Recipe,
    positions: int,
    plain: Gradients,
) -> tuple[Tensor, Solution, float]:
    """Drift and solution of this step's problem, as `pipeline.weigh`; and the seconds spent on it.

    Fills the plain gradients on the way.

    Args:
        head: The layer.
        owners: Its optimizers.
        source: What the gradients are computed from.
        captured: What is known about them; `gradients` has their shape and type alone.
        recipe: From Gram operator and drift to extra weights.
        positions: Tokens of a sample.
        plain: To be filled; those of weight and bias are needed here.
    """
    owners = trained_parts(head, owners)
    if recipe.products == 0 and getattr(recipe, "radius", None) != 0:
        raise Plain(
            f"recipe {recipe.name!r} needs the whole gradient at the head's output, which a fused "
            "loss never holds in memory; call the head, or use the default recipe"
        )
    approximate = positions == 1 and approximates(owners, captured, recipe)
    made = _Sums(head, owners, source, captured, recipe, plain, folds=approximate)
    if sliceable(owners):
        visit(source, plain, made.look)
    else:  # the step of some outputs depends on the gradients of all
        visit(source, plain)
        made.predict_all()
        visit(source, None, made.look)
    began = time.perf_counter()
    drift, size = by_sample(made.drift, positions), made.square.sqrt()
    drift = -drift if maximises(head, owners) else drift
    gram = made.folded() if approximate else made.exact(positions)
    solution = recipe(gram, drift, size, made.lr)
    if approximate:
        product = made.exact(1).times if captured.measure else None
        solution = approximated(solution, size, recipe, product)
    return drift, solution, made.seconds + time.perf_counter() - began


class Streaming(Gram):
    """The exact operator, whose products compute the gradient at the output again.

    Args:
        source: Head, features and targets.
        gains: By the first output of a block. See `gram.MatrixFree`.
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

        def look(outputs: slice, g: Tensor) -> None:
            scaled = g.t() * rows
            moved = scaled @ self._source.features.to(g)
            if self._has_bias:
                moved = columns(moved, scaled.sum(1))
            total.add_(along(self._source, g, moved * self._gains[outputs.start]))

        visit(self._source, None, look)
        total = total if self._unscale is None else total * self._unscale**2
        return by_sample(total, self._positions)


class Folded(MatrixFree):
    """A sketched operator that makes nothing of the size of the features for a product."""

    def along(self, displacement: Tensor) -> Tensor:
        return (self.features @ displacement.t()).mul_(self.output_gradients).sum(1)

    def _squares(self) -> Tensor:
        g2, gain = self.output_gradients.square().sum(1), self.gain
        if isinstance(gain, Tensor) and gain.dim() == 2:
            return (self.features.square() @ gain[0]) * g2
        return self.features.square().sum(1) * g2 * gain


class _Sums:
    """What is summed over blocks of outputs."""

    def __init__(
        self,
        head: nn.Linear,
        owners: Mapping[str, Optimizer],
        source: Streamed,
        captured: Captured,
        recipe: Recipe,
        plain: Gradients,
        *,
        folds: bool,
    ) -> None:
        self._head, self._owners, self._source = head, owners, source
        self._captured, self._recipe, self._plain = captured, recipe, plain
        self._whole: Update | None = None
        tokens, outputs = len(source.features), len(source.weight)
        self._drift = source.features.new_zeros(tokens, dtype=source.wide)
        self.square = self._drift.new_zeros(())
        self.lr: Scalar = 0.0
        self.seconds = 0.0
        self._gain: Gain = 1.0
        self._gains: dict[int, Gain] = {}
        self._squares = torch.zeros_like(self._drift)
        self._keeps_gains = bool(recipe.products) and (captured.measure or not folds)
        self._folded: Tensor | None = None
        if folds:
            self._folded = self._drift.new_zeros(tokens, min(WIDTH, outputs))
            self._signs = random_signs(outputs, self._drift)
            squares = self._captured.inputs(self._owners).square().sum(0)
            self._factors, self._by_output = Factors(squares), False

    @property
    def drift(self) -> Tensor:
        """Of each token. [N]."""
        return self._unscaled(self._drift)

    def predict_all(self) -> None:
        """For optimizers that cannot predict some outputs without the others."""
        grad = self._batch_gradient(slice(None))
        self._whole = predict_total(self._head, self._owners, grad, self._captured)

    def look(self, rows: slice, g: Tensor) -> None:
        """Add what follows from the gradient at some outputs. g [N, n]."""
        began = time.perf_counter()
        grad = self._batch_gradient(rows)
        update = self._update(rows, grad)
        self._drift += along(self._source, g, update.step)
        self.square += update.size(self._recipe.metric).square()
        self.lr = update.lr
        if self._keeps_gains:
            self._gains[rows.start] = update.gain
            self._squares += self._norms(g.square(), update.gain)
        if self._folded is not None:
            signs = self._signs[rows]
            if isinstance(update.gain, Tensor) and update.gain.shape == grad.shape:
                self._by_output = True
                signs = signs * self._factors.add(grad, update.gain).sqrt()
            self._gain = update.gain
            fold_into(self._folded, g * signs, rows.start)
        self.seconds += time.perf_counter() - began

    def folded(self) -> Gram:
        """The sketched operator, as `sketch.sketch` makes it."""
        assert self._folded is not None
        gain = self._factors.by_input.unsqueeze(0) if self._by_output else self._gain
        folded, has_bias = self._unscaled(self._folded), "bias" in self._owners
        gram = Folded(self._captured.inputs(self._owners), folded, gain, has_bias=has_bias)
        tokens, inputs = gram.features.shape
        # A matrix where it is no larger than a block of logits.
        small = tokens * tokens <= max(FEW, tokens * inputs // 4)
        return choose(gram, self._recipe.products) if small else gram

    def exact(self, positions: int) -> Gram:
        """The exact operator."""
        squares = self._squares
        if positions > 1 and self._recipe.products:
            squares = self._squares_of_sums(positions)
        unscale, has_bias = self._captured.unscale, "bias" in self._owners
        squares = squares if unscale is None else squares * unscale**2
        return Streaming(self._source, self._gains, squares, positions, unscale, has_bias=has_bias)

    def _batch_gradient(self, rows: slice) -> Tensor:
        """Of the loss alone, unscaled: weight and bias side by side. -> [n, d]."""
        assert self._plain.weight is not None
        grad = self._plain.weight[rows].to(self._source.wide)
        if "bias" in self._owners:
            assert self._plain.bias is not None
            grad = columns(grad, self._plain.bias[rows].to(grad))
        return self._unscaled(grad)

    def _update(self, rows: slice, grad: Tensor) -> Update:
        if self._whole is None:
            return predict_total(self._head, self._owners, grad, self._captured, rows)
        gain = self._whole.gain
        if isinstance(gain, Tensor) and gain.dim() == 2 and len(gain) > 1:
            gain = gain[rows]
        return Update(self._whole.step[rows], gain, self._whole.lr)

    def _norms(self, g2: Tensor, gain: Gain) -> Tensor:
        """Squared norms of the tokens' gradients at some outputs. [N, n] -> [N]."""
        x2 = self._captured.inputs(self._owners).square()
        if not isinstance(gain, Tensor) or gain.dim() == 0:
            return x2.sum(1) * g2.sum(1) * gain
        return (g2 * (x2 @ gain.t())).sum(1)

    def _squares_of_sums(self, positions: int) -> Tensor:
        """Squared norms of the samples' gradients, each a sum over positions. -> [B]."""
        x = self._captured.inputs(self._owners)
        x = x.view(-1, positions, x.shape[1])
        total = self._drift.new_zeros(len(x))

        def look(rows: slice, g: Tensor) -> None:
            for each in range(len(x)):  # one sample at a time: [n, d] and no more
                own = g[each * positions : (each + 1) * positions].t() @ x[each]
                total[each] += (own.square() * self._gains[rows.start]).sum()

        visit(self._source, None, look)
        return total

    def _unscaled(self, values: Tensor) -> Tensor:
        unscale = self._captured.unscale
        return values if unscale is None else values * unscale


def fold_into(folded: Tensor, signed: Tensor, first: int) -> None:
    """Add columns `first` and on to those they are folded into, see `sketch.fold`. [N, n]."""
    width, done = folded.shape[1], 0
    while done < signed.shape[1]:
        column = (first + done) % width
        count = min(width - column, signed.shape[1] - done)
        folded.narrow(1, column, count).add_(signed.narrow(1, done, count))
        done += count


def along(source: Streamed, g: Tensor, displacement: Tensor) -> Tensor:
    """Change of each token's loss if some outputs move. g [N, n], displacement [n, d] -> [N]."""
    has_bias = displacement.shape[1] > source.features.shape[1]
    bias = displacement[:, -1] if has_bias else None
    weight = displacement[:, :-1] if has_bias else displacement
    return nn.functional.linear(source.features.to(g), weight, bias).mul_(g).sum(1)


def by_sample(tokens: Tensor, positions: int) -> Tensor:
    """Sums over the positions of each sample. [B * T] -> [B]."""
    return tokens if positions == 1 else tokens.view(-1, positions).sum(1)
