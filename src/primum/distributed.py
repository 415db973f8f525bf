"""The same problem over several ranks: the global batch's, exactly, or each rank's own block.

Under data parallelism the step is made of the mean of the ranks' gradients, so a sample's share of
it is its gradient divided by the number of ranks. Two exact ways to the global problem:

    gather    the head's input and output gradients of all samples, once, to every rank; each solves
              the whole problem and keeps its own rows
    sum       no sample leaves its rank: every Gram product needs the sum of one head-sized matrix,
              and nothing of the size of the global batch squared exists anywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.gram import operations
from primum.pipeline import Captured, weigh
from primum.problem import Evidence, Solution
from primum.ranks import Meeting, Ranks
from primum.recipe import Recipe
from primum.update import accumulated

PER_BYTE = 30  # What one byte on the wire costs, in floating-point operations.
PER_MESSAGE = 50_000_000  # And what one more collective costs.

# What `scope="auto"` may cost: of the bytes of the gradient's own all-reduce, and times the
# operations of each rank by itself. Costs below 1 MiB or 1e10 operations are ignored.
AFFORDABLE, FEW_BYTES = 0.25, 1 << 20
REPEATED, FEW_OPERATIONS = 16, 10**10
WHY_APART = (
    "solving over all ranks would send more than a quarter of the gradient all-reduce's traffic, "
    "or repeat too much work on each rank, so each rank solves for its own samples; pass "
    'scope="global" to solve jointly anyway, or scope="local" to silence this'
)


def weigh_together(
    ranks: Ranks,
    meeting: Meeting,
    way: str,
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    captured: Captured,
    recipe: Recipe,
) -> tuple[Tensor, Solution]:
    """Drift and solution of the global problem, the same on every rank. Rows in rank order."""
    share = torch.full((), 1 / ranks.size, dtype=captured.dtype, device=captured.gradients.device)
    captured = replace(
        captured,
        unscale=share if captured.unscale is None else captured.unscale * share,
        before=share if captured.before is None else captured.before * share,
        tokens=False,  # never approximated
    )
    if way == "gather":
        with ranks.waited_for():
            everyone = _gathered(ranks, meeting, head, owners, captured)
        return weigh(head, owners, everyone, recipe)
    with ranks.waited_for():
        captured = replace(captured, over_ranks=ranks.sum, samples=sum(meeting.counts))
        drift, own = weigh(head, owners, captured, recipe)
        vectors = torch.stack((drift, own.drift_after, own.extra_weights), 1)
        drift, after, weights = ranks.gather(vectors, meeting.counts).unbind(1)
    return drift, Solution(weights, own.objective, own.iterations, Evidence(own.lower_bound, after))


def _gathered(
    ranks: Ranks,
    meeting: Meeting,
    head: nn.Linear,
    owners: Mapping[str, Optimizer],
    captured: Captured,
) -> Captured:
    """What all ranks have captured."""
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
    before = ranks.sum(_accumulated(head, owners, captured)) if meeting.before else None
    return replace(captured, features=features, gradients=gradients, accumulated=before)


def _accumulated(head: nn.Linear, owners: Mapping[str, Optimizer], captured: Captured) -> Tensor:
    """This rank's part of what has accumulated over all ranks. [d_out, d]."""
    trained = {part: owner for part, owner in owners.items() if getattr(head, part).requires_grad}
    like = captured.gradients.new_empty(0, dtype=captured.dtype)
    before = accumulated(head, trained, like, captured.before)
    if before is None:
        size = head.out_features, head.in_features + ("bias" in trained)
        return captured.gradients.new_zeros(size, dtype=captured.dtype)
    return before.contiguous()


def choose_way(
    ranks: Ranks,
    meeting: Meeting,
    captured: Captured,
    recipe: Recipe,
    *,
    factorises: bool,
    params: int | None = None,
) -> str | None:
    """ "gather" or "sum", whichever costs less. The same answer on every rank.

    With `params`, the number of parameters whose gradients are averaged, only of those ways that
    send at most a part of what that average sends, and do not repeat too much on every rank; None
    if there is none. A recipe that makes no products needs the samples themselves.
    """
    sizes = sum(meeting.counts), max(meeting.positions, 1)
    sides = captured.features.shape[-1], captured.gradients.shape[-1]
    itemsize = captured.gradients.element_size()
    products = recipe.products
    sent = traffic(*sizes, *sides, ranks=ranks.size, products=products, itemsize=itemsize)
    cost = costs(
        *sizes,
        *sides,
        ranks=ranks.size,
        products=products,
        itemsize=itemsize,
        factorises=factorises,
    )
    ways = {"gather": (cost[0], sent[0])}
    if products:
        ways["sum"] = (cost[1], sent[1])
    if params is not None:
        own = 2 * (ranks.size - 1) / ranks.size * 4 * params
        budget = max(FEW_BYTES, AFFORDABLE * own)
        ways = {way: figures for way, figures in ways.items() if figures[1] <= budget}
        batch, positions = sizes
        alone = work(max(batch // ranks.size, 1), positions, *sides, products, factorises)
        if work(batch, positions, *sides, products, factorises) > max(
            FEW_OPERATIONS, REPEATED * alone
        ):
            ways.pop("gather", None)
    return min(ways, key=lambda way: ways[way][0], default=None)


def traffic(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int = 13,
    itemsize: int = 4,
) -> tuple[float, float]:
    """Bytes that one rank receives by gathering and by summing. `batch` is the global one."""
    gather = (batch - batch / ranks) * positions * (inputs + outputs) * itemsize
    ring = 2 * (ranks - 1) / ranks * inputs * outputs * 4
    return gather, (products + 1) * ring  # and the sum of the gradient itself


def costs(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int,
    itemsize: int = 4,
    factorises: bool = False,
) -> tuple[float, float]:
    """What gathering and summing cost one rank, in floating-point operations.

    `batch` is the global one. Bytes received count `PER_BYTE` each, a collective `PER_MESSAGE`.
    """
    sent = traffic(
        batch, positions, inputs, outputs, ranks=ranks, products=products, itemsize=itemsize
    )
    repeated = work(batch, positions, inputs, outputs, products, factorises)
    shared = products * 4 * batch * positions * inputs * outputs / ranks
    gather = repeated + PER_BYTE * sent[0] + 2 * PER_MESSAGE
    total = shared + PER_BYTE * sent[1] + 2 * products * PER_MESSAGE
    return gather, total


def work(
    batch: int, positions: int, inputs: int, outputs: int, products: int, factorises: bool
) -> int:
    """Floating-point operations of one process that solves for `batch` samples."""
    dense, free = operations(
        batch, positions, inputs, outputs, products=products, factorises=factorises
    )
    return min(dense, free) if products else dense
