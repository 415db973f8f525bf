"""The same problem over several ranks: the global batch's, exactly, or each rank's own block.

Under data parallelism the step is made of the mean of the ranks' gradients, so a sample's share of
it is its gradient divided by the number of ranks. Three exact ways to the global problem:

    gather    the head's input and output gradients of all samples, once, to every rank; each solves
              the whole problem and keeps its own rows
    rows      the same is gathered, but each rank computes with some of the head's outputs, and what
              they give is summed: the matrix once, or B numbers for each product (`rows.py`)
    sum       no sample leaves its rank: every Gram product needs the sum of one head-sized matrix,
              and nothing of the size of the global batch squared exists anywhere

A head that is sharded over the ranks (`shards.py`) goes by "rows" too, each rank with those it
holds. By "sum", and where each rank solves for its own samples ("local"), its gradient is reduced
once more and its predicted step and gain are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import MatrixFree, choose
from primum.pipeline import Captured, maximises, trained_parts, weigh
from primum.problem import Evidence, Solution
from primum.ranks import Meeting, Ranks
from primum.recipe import Recipe
from primum.rows import Part, weigh_rows
from primum.shards import Shards
from primum.update import accumulated
from primum.ways import sizes_of


def weigh_together(
    ranks: Ranks | None,
    meeting: Meeting | None,
    way: str | None,
    head: nn.Linear | Shards,
    owners: Mapping[str, Optimizer],
    captured: Captured,
    recipe: Recipe,
) -> tuple[Tensor, Solution]:
    """Drift and solution of the global problem, the same on every rank. Rows in rank order."""
    if isinstance(head, Shards):
        return weigh_sharded(head, meeting, way, owners, captured, recipe)
    assert ranks is not None
    assert meeting is not None
    share = torch.full((), 1 / ranks.size, dtype=captured.dtype, device=captured.gradients.device)
    captured = replace(
        captured,
        unscale=share if captured.unscale is None else captured.unscale * share,
        before=share if captured.before is None else captured.before * share,
        tokens=False,  # never approximated
    )
    if way == "sum":
        with ranks.waited_for():
            captured = replace(captured, over_ranks=ranks.sum, samples=sum(meeting.counts))
            return joined(ranks, meeting, *weigh(head, owners, captured, recipe))
    with ranks.waited_for():
        everyone = gather_samples(ranks, meeting, captured)
        trained = trained_parts(head, owners)
        if meeting.before:
            before = ranks.sum(_accumulated(head, trained, captured))
            everyone = replace(everyone, accumulated=before)
    if way == "gather":
        return weigh(head, owners, everyone, recipe)
    part = Part(head, trained, head.out_features, ranks, whole=True)
    if isinstance(everyone.accumulated, Tensor):
        everyone = replace(everyone, accumulated=everyone.accumulated[part.rows])
    dense = sizes_of(ranks, meeting, captured, recipe, owners).rows_are_dense
    return weigh_rows(part, everyone, recipe, dense=dense)


def joined(ranks: Ranks, meeting: Meeting, drift: Tensor, own: Solution) -> tuple[Tensor, Solution]:
    """Drift and solution of all samples, where each rank has those of its own."""
    vectors = torch.stack((drift, own.drift_after, own.extra_weights), 1)
    drift, after, weights = ranks.gather(vectors, meeting.counts).unbind(1)
    return drift, Solution(weights, own.objective, own.iterations, Evidence(own.lower_bound, after))


def gather_samples(ranks: Ranks, meeting: Meeting, captured: Captured) -> Captured:
    """Features and output gradients of the samples of all ranks."""
    features, gradients = captured.features, captured.gradients
    if meeting.positions > features.shape[1] and features.dim() == 3:
        missing = (0, 0, 0, meeting.positions - features.shape[1])  # zeros count for nothing
        features = nn.functional.pad(features, missing)
        gradients = nn.functional.pad(gradients, missing)
    if features.dtype == gradients.dtype:
        both = ranks.gather(torch.cat((features, gradients), -1), meeting.counts)
        features, gradients = torch.split(both, [features.shape[-1], gradients.shape[-1]], -1)
    else:
        features = ranks.gather(features, meeting.counts)
        gradients = ranks.gather(gradients, meeting.counts)
    return replace(captured, features=features, gradients=gradients)


def _accumulated(head: nn.Linear, trained: Mapping[str, Optimizer], captured: Captured) -> Tensor:
    """This rank's part of what has accumulated over all ranks. [d_out, d]."""
    before = accumulated(head, trained, captured.dtype, captured.before)
    if before is None:
        size = head.out_features, head.in_features + ("bias" in trained)
        return captured.gradients.new_zeros(size, dtype=captured.dtype)
    return before.contiguous()


def weigh_sharded(
    shards: Shards,
    meeting: Meeting | None,
    way: str | None,
    owners: Mapping[str, Optimizer],
    captured: Captured,
    recipe: Recipe,
) -> tuple[Tensor, Solution]:
    """Drift and solution, of all samples or, by way "local", of this rank's.

    `meeting` is None on a mesh of one rank.
    """
    ranks, like = shards.ranks, captured.gradients
    share = torch.full((), 1 / shards.divisor(), dtype=captured.dtype, device=like.device)
    with ranks.waited_for() if meeting is not None else nullcontext():
        part = shards.part(owners)
        waits = bool(shards.unreduced()) if meeting is None else meeting.before
        captured = replace(captured, accumulated=shards.before(part, captured, share, waits))
        scale = share if captured.unscale is None else captured.unscale * share
        shared = replace(captured, unscale=scale)
        if meeting is not None and way == "rows":
            shared = gather_samples(ranks, meeting, shared)
    if meeting is None:
        before = 0.0 if captured.accumulated is None else captured.accumulated
        return weigh(part.head, part.owners, replace(shared, accumulated=before), recipe)
    if way == "rows":
        sizes = sizes_of(ranks, meeting, captured, recipe, owners, shards.holders)
        try:
            return weigh_rows(part, shared, recipe, dense=sizes.rows_are_dense)
        finally:
            ranks.broken = ranks.broken or shards.holders.broken
    with ranks.waited_for():
        x, g = shared.inputs(part.owners), shared.outputs()
        update = part.update(shards.reduce(g.flatten(0, -2).t() @ x.flatten(0, -2)), shared)
        size = shards.holders.sum(update.size(recipe.metric).square()).sqrt()
        update = part.everywhere(update)
        sign = -1.0 if maximises(part.head, part.owners) else 1.0
        if way == "sum":
            gram = MatrixFree(
                x,
                sign * g,
                update.gain,
                has_bias="bias" in part.owners,
                over_ranks=ranks.sum,
                samples=sum(meeting.counts),
            )
            drift = gram.along(update.step)
            return joined(ranks, meeting, drift, recipe(gram, drift, size, update.lr))
    own = MatrixFree(x, sign * captured.outputs(), update.gain, has_bias="bias" in part.owners)
    drift = own.along(update.step)
    chosen = choose(own, recipe.products) if recipe.products else own
    return drift, recipe(chosen, drift, size, update.lr)
