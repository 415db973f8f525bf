"""2 to 5 in one call: from what was captured at the head to extra weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import Dense, Head, dense_is_cheaper
from primum.problem import Solution
from primum.recipe import Primum, Recipe
from primum.update import Update, accumulated, group_of, predict_head, sliceable

PART_ENTRIES = 1 << 20  # Of the samples' gradients, held at a time: 4 MiB in float32.
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
        accumulated: Takes the place of what is in `.grad`. [d_out, d].
    """

    features: Tensor
    gradients: Tensor
    unscale: Tensor | None = None
    before: Tensor | None = None
    factor: Tensor | None = None
    accumulated: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.gradients.dtype == torch.float64 else torch.float32

    def outputs(self, rows: slice | None = None) -> Tensor:
        """Gradients of some outputs, in working precision and unscaled."""
        some = self.gradients
        if rows is not None:
            some = some.narrow(-1, rows.start, rows.stop - rows.start)
        some = some.to(self.dtype)
        return some if self.unscale is None else some * self.unscale


def samples(tensors: Sequence[Tensor], per: str) -> Tensor:
    """[d] -> [1, d]; [B, d] and [B, T, d] as they are; [B, H, W, d] -> [B, H * W, d].

    Per token, every row of every call is a sample of its own: [B, T, d] -> [B * T, d]. Per sample,
    several calls of the head for the same samples count as positions of one: [B, positions, d].
    """
    tensors = [each.unsqueeze(0) if each.dim() == 1 else each for each in tensors]
    if per == "token":
        tensors = [each.flatten(0, -2) for each in tensors]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    tensors = [each.flatten(1, -2) if each.dim() > 3 else each for each in tensors]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([each.unsqueeze(1) if each.dim() == 2 else each for each in tensors], 1)


def times(gradients: Sequence[Tensor], extra_weights: Tensor, per: str) -> list[Tensor]:
    """Each gradient times `1 + w`, row by row: every call of the same samples, or its own rows."""
    counts = [rows_of(each, per) for each in gradients]
    shared = per == "sample" or len(gradients) == 1
    rows = [extra_weights] * len(gradients) if shared else torch.split(extra_weights, counts)
    weighted = []
    for each, own in zip(gradients, rows, strict=True):
        leading = each.shape[:-1] if per == "token" else each.shape[:1]
        shape = (*leading, *(1,) * (each.dim() - len(leading))) if each.dim() > 1 else (1,)
        weighted.append(each * (1 + own).to(each.dtype).view(shape))
    return weighted


def rows_of(gradient: Tensor, per: str) -> int:
    """How many samples, or tokens, a gradient at the head's output is for."""
    if gradient.dim() == 1:
        return 1
    return gradient.shape[:-1].numel() if per == "token" else len(gradient)


def trained(head: nn.Linear, owners: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """The parts of the head that move. A bias may be frozen later; then it is a constant."""
    return {part: owner for part, owner in owners.items() if getattr(head, part).requires_grad}


def with_ones(captured: Captured, owners: Mapping[str, Optimizer]) -> Tensor:
    """Features in working precision, with a column of ones if the bias is trained."""
    x = captured.features.to(captured.dtype)
    return nn.functional.pad(x, (0, 1), value=1.0) if "bias" in owners else x


def maximises(head: nn.Linear, owners: Mapping[str, Optimizer]) -> bool:
    """Whether the step goes uphill: then what it lowers is minus the loss."""
    return bool(group_of(owners["weight"], head.weight).get("maximize", False))


def weigh(
    head: nn.Linear, owners: Mapping[str, Optimizer], captured: Captured, recipe: Recipe
) -> tuple[Tensor, Solution]:
    """Drift and solution of this step's problem. -> [B], extra weights [B]."""
    owners = trained(head, owners)
    x = with_ones(captured, owners)
    uphill = maximises(head, owners)
    if isinstance(recipe, Primum) and _in_parts(x, captured.gradients, recipe, owners):
        gram, drift, size = parts(head, owners, x, captured, uphill=uphill)
        return drift, recipe.of_gram(Dense(gram), drift, size)
    g = captured.outputs()
    g_t = g.flatten(0, -2).t()
    update = _predict(head, owners, g_t @ x.flatten(0, -2), captured)
    if uphill:
        g, g_t = -g, -g_t
    seen = Head(x, g, update.gain, has_bias="bias" in owners, transposed=g_t)
    drift = seen.along(update.step)
    return drift, recipe(seen, update, drift)


def _predict(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    grad: Tensor,
    captured: Captured,
    rows: slice | None = None,
) -> Update:
    """The update, if `grad` is added to what has accumulated before."""
    if captured.accumulated is None:
        before = accumulated(head, owners, grad, captured.before, rows)
    elif rows is None:
        before = captured.accumulated
    else:
        before = captured.accumulated.narrow(0, rows.start, rows.stop - rows.start)
    total = grad if before is None else grad + before
    return predict_head(head, owners, total, factor=captured.factor, rows=rows)


def _in_parts(x: Tensor, g: Tensor, recipe: Primum, owners: Mapping[str, Optimizer]) -> bool:
    """Whether to go through the head a few outputs at a time: for sequences and large heads.

    But where the matrix of a large batch would cost more than the solver's products without it.
    """
    positions = 1 if x.dim() == 2 else x.shape[1]
    inputs, outputs = x.shape[-1], g.shape[-1]
    if recipe.radius == 0 or (positions == 1 and inputs * outputs <= LARGE):
        return False
    cheap = dense_is_cheaper(
        len(x), positions, inputs, outputs, products=recipe.max_iters + 2, factorises=False
    )
    return cheap and sliceable(owners)


def parts(
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    x: Tensor,
    captured: Captured,
    *,
    uphill: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gram matrix, drift and size of the step, summed over blocks of outputs. Exact for any gain.

    For each block the samples' gradients are formed; their sum is the batch's gradient, from which
    the update of these outputs is predicted; then they serve for drift and matrix. One product of
    the size of the head's own weight gradient in all, and nothing of the size of the head or of its
    output: a few percent of what training a language model holds at that moment.

    Shapes: x [B, d] or [B, T, d] -> [B, B], [B], scalar.
    """
    gram, drift = x.new_zeros(len(x), len(x)), x.new_zeros(len(x))
    square = x.new_zeros(())
    for rows in _blocks(x, captured.gradients.shape[-1]):
        g = captured.outputs(rows)
        each = g.unsqueeze(2) * x.unsqueeze(1) if x.dim() == 2 else g.transpose(1, 2) @ x
        update = _predict(head, owners, each.sum(0), captured, rows)
        flat = each.flatten(1)
        drift += flat @ update.step.flatten()
        root = update.gain**0.5
        square += (update.step / root).square_().sum()
        each *= root
        gram.addmm_(flat, flat.t())
    return gram, -drift if uphill else drift, square.sqrt()


def _blocks(x: Tensor, outputs: int) -> Iterator[slice]:
    width = max(1, PART_ENTRIES // (len(x) * x.shape[-1]))
    for first in range(0, outputs, width):
        yield slice(first, min(first + width, outputs))
