"""Which way over several ranks costs less: bytes, collectives and operations, from sizes alone.

Every rank decides from the same numbers, so all decide alike. Operations are floating-point
operations of one rank and one step; `batch` is the global one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from primum.gram import operations
from primum.pipeline import Captured
from primum.ranks import Meeting, Ranks
from primum.recipe import Recipe
from primum.update import sliceable, uniform

PER_BYTE = 30  # What one byte on the wire costs, in floating-point operations.
PER_MESSAGE = 50_000_000  # And what one more collective costs.

# What `scope="auto"` may cost: of the bytes that training sends for the gradients itself, and times
# the operations of each rank by itself. Costs below 1 MiB or 1e10 operations are ignored.
AFFORDABLE, FEW_BYTES = 0.25, 1 << 20
REPEATED, FEW_OPERATIONS = 16, 10**10

# Where samples are gathered every rank holds all of them: not if these take more memory than eight
# heads and 1 GiB, and no samples need to be gathered.
HEADS_HELD, FEW_HELD = 8, 1 << 30


def sizes_of(meeting: Meeting, captured: Captured) -> tuple[int, int, int, int]:
    """Samples, positions, inputs and outputs of the global problem."""
    sides = captured.features.shape[-1], captured.gradients.shape[-1]
    return sum(meeting.counts), max(meeting.positions, 1), *sides


def way_for(
    scope: str,
    holders: Ranks | None,
    ranks: Ranks,
    meeting: Meeting,
    captured: Captured,
    recipe: Recipe,
    owners: Mapping[str, Optimizer],
    *,
    warn: Callable[[str, str], None],
) -> str | None:
    """How to solve with the other ranks; None, or "local" of a sharded head, if each does alone.

    `holders` are the ranks among which a sharded head is split; None if it is whole.
    """
    if scope == "local":
        return "local"
    params = None
    if scope == "auto":
        groups = owners["weight"].param_groups
        params = sum(p.numel() for group in groups for p in group["params"])
    given, factorises = (meeting, captured, recipe), uniform(owners)
    if holders is None:
        way = choose_way(
            ranks, *given, factorises=factorises, params=params, by_rows=sliceable(owners)
        )
    else:
        way = choose_sharded_way(ranks, holders, *given, factorises=factorises, params=params)
    if way is None:
        warn(
            "dear",
            "solving over all ranks would send more than a quarter of the gradient "
            "all-reduce's traffic, or repeat too much work on each rank, so each rank solves "
            'for its own samples; pass scope="global" to solve jointly anyway, or '
            'scope="local" to silence this',
        )
    return "local" if way is None and holders is not None else way


def choose_way(
    ranks: Ranks,
    meeting: Meeting,
    captured: Captured,
    recipe: Recipe,
    *,
    factorises: bool,
    params: int | None = None,
    by_rows: bool = True,
) -> str | None:
    """ "gather", "rows" or "sum", whichever costs least. The same answer on every rank.

    With `params`, the number of parameters whose gradients are averaged, only of those ways that
    send at most a part of what that average sends, and do not repeat too much on every rank; None
    if there is none. A recipe that makes no products needs the samples themselves. `by_rows`:
    whether some rows of the head can be predicted without the others.
    """
    sizes = sizes_of(meeting, captured)
    settings: dict[str, Any] = {
        "ranks": ranks.size,
        "products": recipe.products,
        "itemsize": captured.gradients.element_size(),
        "factorises": factorises,
    }
    sent, cost = traffic(*sizes, **settings), costs(*sizes, **settings)
    ways = {"gather"}
    if recipe.products:
        ways = ways | {"rows"} if by_rows else ways
        ways = ways | {"sum"} if holdable(*sizes) else {"sum"}
    if params is not None:
        budget = max(FEW_BYTES, AFFORDABLE * ring(4 * params, ranks.size))
        ways = {way for way in ways if sent[way] <= budget}
        alone = work(max(sizes[0] // ranks.size, 1), *sizes[1:], recipe.products, factorises)
        if work(*sizes, recipe.products, factorises) > max(FEW_OPERATIONS, REPEATED * alone):
            ways.discard("gather")
    return min(sorted(ways), key=lambda way: cost[way], default=None)


def choose_sharded_way(
    ranks: Ranks,
    holders: Ranks,
    meeting: Meeting,
    captured: Captured,
    recipe: Recipe,
    *,
    factorises: bool,
    params: int | None = None,
) -> str | None:
    """ "rows" or "sum" for a sharded head; None if neither is affordable. As `choose_way`.

    Training itself gathers the parameters twice and reduces the gradients once.
    """
    sizes = sizes_of(meeting, captured)
    settings: dict[str, Any] = {
        "ranks": ranks.size,
        "products": recipe.products,
        "itemsize": captured.gradients.element_size(),
        "factorises": factorises,
        "holders": holders.size,
    }
    sent, cost = traffic(*sizes, **settings), costs(*sizes, **settings)
    head = 3 * (ranks.size - 1) / ranks.size * 4 * sizes[2] * sizes[3]  # gradient, step, gain
    sent["sum"] += head
    cost["sum"] += PER_BYTE * head + 3 * PER_MESSAGE
    ways = {"rows", "sum"} if holdable(*sizes) else {"sum"}
    ways = ways if recipe.products else {"rows"}
    if params is not None:
        own = 3 * (ranks.size - 1) / ranks.size * 4 * params
        ways = {way for way in ways if sent[way] <= max(FEW_BYTES, AFFORDABLE * own)}
    return min(sorted(ways), key=lambda way: cost[way], default=None)


def holdable(batch: int, positions: int, inputs: int, outputs: int) -> bool:
    """Whether the rows of all samples, in float32, fit beside the head on every rank."""
    held = 4 * batch * positions * (inputs + outputs)
    return held <= max(FEW_HELD, HEADS_HELD * 4 * inputs * outputs)


def ring(size: float, ranks: int) -> float:
    """Bytes that one rank receives in an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def traffic(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int = 13,
    itemsize: int = 4,
    factorises: bool = False,
    holders: int | None = None,
) -> dict[str, float]:
    """Bytes that one rank receives, by way. `holders`: ranks that share the rows, if not all."""
    gather = (batch - batch / ranks) * positions * (inputs + outputs) * itemsize
    among = ranks if holders is None else holders
    sizes = batch, positions, inputs, outputs
    dense = rows_are_dense(*sizes, ranks=among, products=products, factorises=factorises)
    summed = batch * batch if dense else batch * (products + 1)
    return {
        "gather": gather,
        "rows": gather + ring(4 * (summed + batch + 1), among),
        "sum": (products + 1) * ring(4 * inputs * outputs, ranks),  # the gradient, and products
    }


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
    holders: int | None = None,
) -> dict[str, float]:
    """What each way costs one rank, in floating-point operations.

    Bytes received count `PER_BYTE` each, a collective `PER_MESSAGE`.
    """
    sizes = batch, positions, inputs, outputs
    among = ranks if holders is None else holders
    sent = traffic(
        *sizes,
        ranks=ranks,
        products=products,
        itemsize=itemsize,
        factorises=factorises,
        holders=holders,
    )
    dense, free = _of_rows(*sizes, ranks=among, products=products, factorises=factorises)
    return {
        "gather": work(*sizes, products, factorises) + PER_BYTE * sent["gather"] + 2 * PER_MESSAGE,
        "rows": min(dense, free) + PER_BYTE * sent["gather"] + 2 * PER_MESSAGE,
        "sum": products * 4 * batch * positions * inputs * outputs / ranks
        + PER_BYTE * sent["sum"]
        + 2 * products * PER_MESSAGE,
    }


def rows_are_dense(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int,
    factorises: bool,
) -> bool:
    """Whether ranks that take some rows of the head each form the matrix of these rows."""
    sizes = batch, positions, inputs, outputs
    dense, free = _of_rows(*sizes, ranks=ranks, products=products, factorises=factorises)
    return products > 0 and dense <= free


def _of_rows(
    batch: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    ranks: int,
    products: int,
    factorises: bool,
) -> tuple[float, float]:
    """What both forms of the way "rows" cost once everything is gathered."""
    dense, free = operations(
        batch, positions, inputs, -(-outputs // ranks), products=products, factorises=factorises
    )
    return (
        dense + PER_BYTE * ring(4 * batch * batch, ranks) + PER_MESSAGE,
        free + (products + 1) * (PER_BYTE * ring(4 * batch, ranks) + PER_MESSAGE),
    )


def work(
    batch: int, positions: int, inputs: int, outputs: int, products: int, factorises: bool
) -> int:
    """Floating-point operations of one process that solves for `batch` samples."""
    dense, free = operations(
        batch, positions, inputs, outputs, products=products, factorises=factorises
    )
    return min(dense, free) if products else dense
