"""From what was captured at the head and what the optimizer holds to a recipe's arguments.

    features, output gradients -> batch gradient -> predicted step -> Gram operator, drift, size

Pure functions: nothing here keeps state. Sequences and large heads go through the outputs in
blocks, many tokens with a large vocabulary through `sketch.py`; `distributed.py` makes the same
arguments over several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import Dense, Gram, MatrixFree, choose, operations, output_blocks, per_sample
from primum.problem import Solution
from primum.recipe import Recipe
from primum.rules import Scalar, wide
from primum.sketch import Tokens, sketch, slices, worthwhile
from primum.update import Update, accumulated, group_of, predict_head, sliceable, uniform

Arguments: TypeAlias = tuple[Gram, Tensor, Tensor, Scalar]  # gram, drift [B], size, lr

LARGE = 1 << 22  # Entries of a head's weight above which nothing of its size is made: 16 MiB.


@dataclass(frozen=True)
class Captured:
    """One backward pass at the head.

    Attributes:
        features: The head's input. [B, d] or [B, T, d], in any floating-point type.
        gradients: At the head's output, as they arrived. [B, d_out] or [B, T, d_out].
        unscale: Undoes the loss scaling of the gradients; None if there is none.
        before: The same for what has accumulated in `.grad`.
        factor: The optimizer will see this times the sum of both; None if just that.
        accumulated: Takes the place of what is in `.grad`. [d_out, d], or 0.
        over_ranks: Sums over ranks that hold some of the samples each; None if all are here.
        samples: How many there are on all ranks.
        tokens: Whether samples are tokens: then the Gram operator may be approximated.
    """

    features: Tensor
    gradients: Tensor
    unscale: Tensor | None = None
    before: Tensor | None = None
    factor: Scalar | None = None
    accumulated: Tensor | float | None = None
    over_ranks: Callable[[Tensor], Tensor] | None = None
    samples: int | None = None
    tokens: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.gradients.dtype)

    def inputs(self, trained: Container[str]) -> Tensor:
        """The features in working precision, with a column of ones if the "bias" is trained."""
        x = self.features.to(self.dtype)
        return nn.functional.pad(x, (0, 1), value=1.0) if "bias" in trained else x.detach()

    def outputs(self, rows: slice | None = None) -> Tensor:
        """Gradients of some outputs, in working precision and unscaled."""
        some = self.gradients
        if rows is not None:
            some = some.narrow(-1, rows.start, rows.stop - rows.start)
        some = some.to(self.dtype)
        return some if self.unscale is None else some * self.unscale


def weigh(
    head: nn.Linear, owners: Mapping[str, Optimizer], captured: Captured, recipe: Recipe
) -> tuple[Tensor, Solution]:
    """Drift and solution of this step's problem. -> [B], extra weights [B]."""
    if not approximates(owners, captured, recipe):
        gram, drift, size, lr = arguments(head, owners, captured, recipe)
        return drift, recipe(gram, drift, size, lr)
    tokens = _tokens(head, owners, captured)
    gram, drift, size, lr = sketch(tokens, metric=recipe.metric, products=recipe.products)
    return drift, replace(recipe(gram, drift, size, lr), approximate=True)


def approximates(owners: Mapping[str, Optimizer], captured: Captured, recipe: Recipe) -> bool:
    """Whether the Gram operator of this step is to be sketched: of many tokens, on one rank.

    Only for a recipe that says `exact = False`.
    """
    if not captured.tokens or captured.features.dim() != 2 or captured.over_ranks is not None:
        return False
    if recipe.products == 0 or getattr(recipe, "exact", True):
        return False
    sides = captured.features.shape[1], captured.gradients.shape[1]
    count, products = len(captured.features), recipe.products
    return worthwhile(count, *sides, products=products, factorises=uniform(owners))


def _tokens(head: nn.Linear, owners: Mapping[str, Optimizer], captured: Captured) -> Tokens:
    owners = trained_parts(head, owners)

    def predict(grad: Tensor, rows: slice | None) -> Update:
        return predict_total(head, owners, grad, captured, rows)

    return Tokens(
        slices(captured.features, captured.gradients),
        len(captured.features),
        predict,
        captured.dtype,
        has_bias="bias" in owners,
        sliceable=sliceable(owners),
        uphill=maximises(head, owners),
        unscale=captured.unscale,
    )


def trained_parts(head: nn.Linear, owners: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Without a bias that was frozen after attaching: it is a constant then."""
    return {part: owner for part, owner in owners.items() if getattr(head, part).requires_grad}


def arguments(
    head: nn.Linear, owners: Mapping[str, Optimizer], captured: Captured, recipe: Recipe
) -> Arguments:
    """What a recipe takes: Gram operator, drift, size of the step in the recipe's metric, lr.

    Args:
        head: The layer.
        owners: The optimizers of its "weight" and, if some optimizer holds it, "bias".
        captured: See `Captured`.
        recipe: Asked for `products` and `metric`.
    """
    owners = trained_parts(head, owners)
    x = captured.inputs(owners)
    if _in_blocks(x, captured, recipe, owners):
        return _arguments_in_blocks(head, owners, x, captured, recipe)
    g = captured.outputs()
    g_t = g.flatten(0, -2).t()
    update = predict_total(head, owners, g_t @ x.flatten(0, -2), captured)
    if maximises(head, owners):
        g, g_t = -g, -g_t
    gram = MatrixFree(
        x,
        g,
        update.gain,
        has_bias="bias" in owners,
        transposed=g_t,
        over_ranks=captured.over_ranks,
        samples=captured.samples,
    )
    drift, size = gram.along(update.step), update.size(recipe.metric)
    if recipe.products == 0 or captured.over_ranks is not None:
        return gram, drift, size, update.lr
    return choose(gram, recipe.products), drift, size, update.lr


def predict_total(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    grad: Tensor,
    captured: Captured,
    rows: slice | None = None,
) -> Update:
    """The update, if `grad` is added to what has accumulated before, over all ranks."""
    before = captured.accumulated
    if before is None:
        before = accumulated(head, owners, grad.dtype, captured.before, rows)
    elif isinstance(before, Tensor) and rows is not None:
        before = before.narrow(0, rows.start, rows.stop - rows.start)
    total = grad if before is None else grad + before
    if captured.over_ranks is not None:
        total = captured.over_ranks(total)
    return predict_head(head, owners, total, factor=captured.factor, rows=rows)


def maximises(head: nn.Linear, owners: Mapping[str, Optimizer]) -> bool:
    """Whether the step goes uphill: then what it lowers is minus the loss."""
    return bool(group_of(owners["weight"], head.weight).get("maximize", False))


def _in_blocks(
    x: Tensor, captured: Captured, recipe: Recipe, owners: Mapping[str, Optimizer]
) -> bool:
    """Whether to go through the head a few outputs at a time: for sequences and large heads.

    Not where the matrix of a large batch would cost more than the solver's products without it.
    """
    positions = 1 if x.dim() == 2 else x.shape[1]
    inputs, outputs = x.shape[-1], captured.gradients.shape[-1]
    if recipe.products == 0 or captured.over_ranks is not None:
        return False
    if (positions == 1 and inputs * outputs <= LARGE) or not sliceable(owners):
        return False
    products = recipe.products
    dense, free = operations(
        len(x), positions, inputs, outputs, products=products, factorises=False
    )
    return dense <= free


def _arguments_in_blocks(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    x: Tensor,
    captured: Captured,
    recipe: Recipe,
) -> Arguments:
    """The same, summed over blocks of outputs, with a dense matrix. Exact for any gain.

    For each block the samples' gradients are formed; their sum is the batch's gradient, from which
    the update of these outputs is predicted; then they serve for drift and matrix. One product of
    the size of the head's own weight gradient in all, and nothing of the size of the head or of its
    output: a few percent of what training a language model holds at that moment.
    """
    gram, drift = x.new_zeros(len(x), len(x)), x.new_zeros(len(x))
    square = x.new_zeros(())
    lr: Scalar = 0.0
    for rows in output_blocks(x, captured.gradients):
        each = per_sample(x, captured.outputs(rows))
        update = predict_total(head, owners, each.sum(0), captured, rows)
        flat, lr = each.flatten(1), update.lr
        drift += flat @ update.step.flatten()
        square += update.size(recipe.metric).square_()
        each *= update.gain**0.5
        gram.addmm_(flat, flat.t())
    return Dense(gram), -drift if maximises(head, owners) else drift, square.sqrt(), lr
