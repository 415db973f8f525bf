"""Which way over several ranks costs less: bytes, collectives and operations, from sizes alone.

Every rank decides from the same numbers, so all decide alike. Operations are floating-point
operations of one rank and one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Sizes:
    """A problem of all ranks together, by its sizes.

    Attributes:
        batch: Samples of all ranks.
        positions: Of a sample; 1 if it has none.
        inputs: Of the head.
        outputs: Of the head.
        ranks: That train together.
        products: With the Gram operator, by the recipe.
        factorises: Whether the gain is one number, so that the matrix of single vectors factorises.
        itemsize: Bytes of an entry of what is gathered.
        holders: Ranks among which the head is split; None if each has all of it.
    """

    batch: int
    positions: int
    inputs: int
    outputs: int
    ranks: int
    products: int
    factorises: bool = False
    itemsize: int = 4
    holders: int | None = None

    @property
    def among(self) -> int:
        """Ranks that take some of the head's rows each, in the way "rows"."""
        return self.ranks if self.holders is None else self.holders

    @property
    def holdable(self) -> bool:
        """Whether the rows of all samples, in float32, fit beside the head on every rank."""
        held = 4 * self.batch * self.positions * (self.inputs + self.outputs)
        return held <= max(FEW_HELD, HEADS_HELD * 4 * self.inputs * self.outputs)

    @property
    def rows_are_dense(self) -> bool:
        """Whether ranks that take some rows of the head each form the matrix of these rows."""
        dense, free = self._of_rows()
        return self.products > 0 and dense <= free

    def work(self) -> int:
        """Operations of one process that solves for all samples."""
        dense, free = self._operations(self.outputs)
        return min(dense, free) if self.products else dense

    def traffic(self) -> dict[str, float]:
        """Bytes that one rank receives, by way. A sharded head's own collectives come on top."""
        sides, others = self.inputs + self.outputs, self.batch - self.batch / self.ranks
        gather = others * self.positions * sides * self.itemsize
        summed = self.batch * (self.batch if self.rows_are_dense else self.products + 1)
        heads = self.products + 1  # the gradient, and products
        return {
            "gather": gather,
            "rows": gather + ring(4 * (summed + self.batch + 1), self.among),
            "sum": heads * ring(4 * self.inputs * self.outputs, self.ranks),
        }

    def costs(self) -> dict[str, float]:
        """What each way costs one rank: bytes received count `PER_BYTE`, collectives `PER_MESSAGE`.

        In floating-point operations.
        """
        sent, size = self.traffic(), self.batch * self.positions * self.inputs * self.outputs
        gathered = PER_BYTE * sent["gather"] + 2 * PER_MESSAGE
        summed = PER_BYTE * sent["sum"] + 2 * self.products * PER_MESSAGE
        return {
            "gather": self.work() + gathered,
            "rows": min(self._of_rows()) + gathered,
            "sum": self.products * 4 * size / self.ranks + summed,
        }

    def _of_rows(self) -> tuple[float, float]:
        """What both forms of the way "rows" cost once everything is gathered."""
        dense, free = self._operations(-(-self.outputs // self.among))
        matrix, vector = (ring(4 * count, self.among) for count in (self.batch**2, self.batch))
        return (
            dense + PER_BYTE * matrix + PER_MESSAGE,
            free + (self.products + 1) * (PER_BYTE * vector + PER_MESSAGE),
        )

    def _operations(self, outputs: int) -> tuple[int, int]:
        sizes = self.batch, self.positions, self.inputs, outputs
        return operations(*sizes, products=self.products, factorises=self.factorises)


def sizes_of(
    ranks: Ranks,
    meeting: Meeting,
    captured: Captured,
    recipe: Recipe,
    owners: Mapping[str, Optimizer],
    holders: Ranks | None = None,
) -> Sizes:
    """Of the global problem."""
    return Sizes(
        batch=sum(meeting.counts),
        positions=max(meeting.positions, 1),
        inputs=captured.features.shape[-1],
        outputs=captured.gradients.shape[-1],
        ranks=ranks.size,
        products=recipe.products,
        factorises=uniform(owners),
        itemsize=captured.gradients.element_size(),
        holders=None if holders is None else holders.size,
    )


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
    sizes = sizes_of(ranks, meeting, captured, recipe, owners, holders)
    way = choose_way(sizes, params, by_rows=holders is not None or sliceable(owners))
    if way is None:
        warn(
            "dear",
            "solving over all ranks would send more than a quarter of the gradient "
            "all-reduce's traffic, or repeat too much work on each rank, so each rank solves "
            'for its own samples; pass scope="global" to solve jointly anyway, or '
            'scope="local" to silence this',
        )
    return "local" if way is None and holders is not None else way


def choose_way(sizes: Sizes, params: int | None = None, *, by_rows: bool = True) -> str | None:
    """ "gather", "rows" or "sum", whichever costs least; a sharded head is never gathered.

    With `params`, the number of parameters that are trained, only of those ways that send at most a
    part of what training itself sends, and do not repeat too much on every rank; None if there is
    none. A recipe that makes no products needs the samples themselves. `by_rows`: whether some rows
    of the head can be predicted without the others.
    """
    sent, cost, sharded = sizes.traffic(), sizes.costs(), sizes.holders is not None
    own = ring(4, sizes.ranks)  # bytes that training sends for each parameter: an all-reduce
    if sharded:  # gathers the parameters twice, reduces the gradients once
        own *= 1.5
        head = own * sizes.inputs * sizes.outputs  # gradient, step, gain
        sent["sum"] += head
        cost["sum"] += PER_BYTE * head + 3 * PER_MESSAGE
    ways = {"gather"} if not sharded else set()
    ways |= {"rows"} if sharded or (by_rows and sizes.products) else set()
    if sizes.products:
        ways = ways | {"sum"} if sizes.holdable else {"sum"}
    if params is not None:
        ways = {way for way in ways if sent[way] <= max(FEW_BYTES, AFFORDABLE * own * params)}
        alone = replace(sizes, batch=max(sizes.batch // sizes.ranks, 1)).work()
        if sizes.work() > max(FEW_OPERATIONS, REPEATED * alone):
            ways.discard("gather")
    return min(sorted(ways), key=lambda way: cost[way], default=None)


def ring(size: float, ranks: int) -> float:
    """Bytes that one rank receives in an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size
