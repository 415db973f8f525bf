"""The same problem over several ranks: the global batch's, exactly, or each rank's own block.

Under data parallelism the step is made of the mean of the ranks' gradients, so a sample's share of
it is its gradient divided by the number of ranks. Two exact ways to the global problem:

    gather    the head's input and output gradients of all samples, once, to every rank; each solves
              the whole problem and keeps its own rows
    sum       no sample leaves its rank: every Gram product needs the sum of one head-sized matrix,
              and nothing of the size of the global batch squared exists anywhere
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import Head, MatrixFree
from primum.problem import Evidence, Problem, Solution
from primum.ranks import Meeting, Ranks
from primum.recipe import Primum, Recipe
from primum.solve import solve
from primum.update import accumulated, predict_head
from primum.weigh import Captured, maximises, trained, weigh, with_ones

PER_BYTE = 64  # What one byte on the wire costs, in floating-point operations.
PER_MESSAGE = 1_000_000  # And what one more collective costs.

AFFORDABLE = 0.25  # Of the bytes of the gradient's own all-reduce; below `ALWAYS` no one counts.
ALWAYS = 1 << 20


def weigh_together(
    ranks: Ranks,
    meeting: Meeting,
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    captured: Captured,
    recipe: Recipe,
) -> tuple[Tensor, Solution]:
    """Drift and solution of the global problem, the same on every rank. Rows in rank order."""
    owners = trained(head, owners)
    share = torch.full((), 1 / ranks.size, dtype=captured.dtype, device=captured.gradients.device)
    captured = replace(
        captured,
        unscale=share if captured.unscale is None else captured.unscale * share,
        before=share if captured.before is None else captured.before * share,
    )
    if (
        not isinstance(recipe, Primum)
        or recipe.radius == 0
        or _gathers(ranks, meeting, captured, recipe)
    ):
        return _gathered(ranks, meeting, head, owners, captured, recipe)
    return _summed(ranks, meeting, head, owners, captured, recipe)


def _gathered(
    ranks: Ranks,
    meeting: Meeting,
    head: nn.Linear,
    owners: dict[str, Optimizer],
    captured: Captured,
    recipe: Recipe,
) -> tuple[Tensor, Solution]:
    features, gradients = captured.features, captured.gradients
    if meeting.positions > features.shape[1] and features.dim() == 3:
        missing = (0, 0, 0, meeting.positions - features.shape[1])  # zeros count for nothing
        features, gradients = (
            nn.functional.pad(features, missing),
            nn.functional.pad(gradients, missing),
        )
    if features.dtype == gradients.dtype:
        both = ranks.gather(torch.cat((features, gradients), -1), meeting.counts)
        features, gradients = torch.split(both, [features.shape[-1], gradients.shape[-1]], -1)
    else:
        features = ranks.gather(features, meeting.counts)
        gradients = ranks.gather(gradients, meeting.counts)
    before = None
    if meeting.before:
        before = ranks.sum(_accumulated(head, owners, captured))
    everyone = replace(captured, features=features, gradients=gradients, accumulated=before)
    return weigh(head, owners, everyone, recipe)


def _summed(
    ranks: Ranks,
    meeting: Meeting,
    head: nn.Linear,
    owners: dict[str, Optimizer],
    captured: Captured,
    recipe: Primum,
) -> tuple[Tensor, Solution]:
    x, g = with_ones(captured, owners), captured.outputs()
    grad = g.flatten(0, -2).t() @ x.flatten(0, -2)
    if meeting.before:
        grad = grad + _accumulated(head, owners, captured)
    update = predict_head(head, owners, ranks.sum(grad), factor=captured.factor)
    seen = Head(x, -g if maximises(head, owners) else g, update.gain, has_bias="bias" in owners)
    drift = seen.along(update.step)
    problem = Problem(
        OverRanks(seen, ranks.sum),
        drift,
        recipe.radius * torch.linalg.vector_norm(update.step / seen.root_gain),
        recipe.max_extra_weight,
        over_ranks=ranks.sum,
        samples=sum(meeting.counts),
    )
    own = solve(problem, recipe.max_iters)
    vectors = torch.stack((drift, own.drift_after, own.extra_weights), 1)
    drift, after, weights = ranks.gather(vectors, meeting.counts).unbind(1)
    return drift, Solution(weights, own.objective, own.iterations, Evidence(own.lower_bound, after))


class OverRanks(MatrixFree):
    """The global batch's Gram operator, on vectors of which every rank holds its own samples."""

    def __init__(
        self, head: Head, total: Callable[[Tensor], Tensor], scale: Tensor | None = None
    ) -> None:
        super().__init__(head, scale)
        self._total = total

    def _sum(self, rows: Tensor) -> Tensor:
        return self._total(super()._sum(rows))

    def scaled(self, scale: Tensor) -> OverRanks:
        return OverRanks(self._head, self._total, scale)


def _accumulated(head: nn.Linear, owners: dict[str, Optimizer], captured: Captured) -> Tensor:
    """This rank's part of what has accumulated over all ranks. [d_out, d]."""
    like = captured.gradients.new_empty(0, dtype=captured.dtype)
    before = accumulated(head, owners, like, captured.before)
    if before is None:
        size = head.out_features, head.in_features + ("bias" in owners)
        return captured.gradients.new_zeros(size, dtype=captured.dtype)
    return before.contiguous()


def _gathers(ranks: Ranks, meeting: Meeting, captured: Captured, recipe: Primum) -> bool:
    """Whether gathering is the cheaper way. The same answer on every rank."""
    inputs, outputs = captured.features.shape[-1], captured.gradients.shape[-1]
    gather, total = costs(
        sum(meeting.counts),
        max(meeting.positions, 1),
        inputs,
        outputs,
        ranks=ranks.size,
        products=recipe.max_iters + 2,
        itemsize=captured.gradients.element_size(),
    )
    return gather <= total


def affordable(ranks: Ranks, meeting: Meeting, captured: Captured, params: int) -> bool:
    """Whether `scope="auto"` solves together: not where it would send more than a part of what the
    gradients' own all-reduce sends. The same answer on every rank."""
    inputs, outputs = captured.features.shape[-1], captured.gradients.shape[-1]
    gather, total = traffic(
        sum(meeting.counts), max(meeting.positions, 1), inputs, outputs, ranks=ranks.size
    )
    own = 2 * (ranks.size - 1) / ranks.size * 4 * params
    return min(gather, total) <= max(ALWAYS, AFFORDABLE * own)


def traffic(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int = 22,
    itemsize: int = 4,
) -> tuple[float, float]:
    """Bytes that one rank receives by gathering and by summing. `batch` is the global one."""
    gather = (batch - batch / ranks) * positions * (inputs + outputs) * itemsize
    ring = 2 * (ranks - 1) / ranks * inputs * outputs * 4
    return gather, (products + 1) * ring


def costs(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int,
    itemsize: int = 4,
) -> tuple[float, float]:
    """What gathering and summing cost one rank, in floating-point operations.

    `batch` is the global one. Bytes received count `PER_BYTE` each, a collective `PER_MESSAGE`.
    """
    size = inputs * outputs
    sent = traffic(
        batch, positions, inputs, outputs, ranks=ranks, products=products, itemsize=itemsize
    )
    dense = 2 * batch * size * (positions + batch + 8)
    free = products * 4 * batch * positions * size
    gather = min(dense, free) + PER_BYTE * sent[0] + PER_MESSAGE
    total = free / ranks + PER_BYTE * sent[1] + 2 * products * PER_MESSAGE
    return gather, total
