"""Traffic of several ranks: formulas for the bytes and collectives of a step.

`local`, `gather` and `sum` are the ways of `primum.distributed.over_ranks`, under
DistributedDataParallel. All values are for one rank and one step; a batch is the global one.
"""

from __future__ import annotations

from dataclasses import dataclass

from primum.distributed.over_ranks import Cost, choose_strategy, ring
from primum.kernel.recipe import Primum

WAYS = ("local", "gather", "sum")
POINTS = Primum.max_iters + 2  # dual points that the solver compares, zero among them
PRODUCTS = Primum.max_iters + 1  # products with the Gram operator
MEETING = 6 * 8  # six integers
FLOAT = 4


@dataclass(frozen=True)
class Case:
    """A head with a bias and a global batch, split evenly over ranks, in float32."""

    inputs: int
    outputs: int
    batch: int
    ranks: int = 1
    optimizer: str = "sgd"

    @property
    def head(self) -> str:
        return f"{self.inputs}x{self.outputs}"

    @property
    def size(self) -> int:
        """Entries of weight and bias."""
        return (self.inputs + 1) * self.outputs

    @property
    def own(self) -> int:
        """Samples of one rank."""
        return -(-self.batch // self.ranks)


@dataclass(frozen=True)
class Sent:
    """Traffic of one rank in the collectives of a step.

    Attributes:
        payload: Bytes as `Collectives.bytes` counts them.
        wire: Bytes that a rank sends, and receives, in ring collectives.
        collectives: Number of collectives.
    """

    payload: int
    wire: float
    collectives: int


def sent(way: str, case: Case) -> Sent:
    """Traffic of a way: its all-gathers and all-reduces, with their payload."""
    if way == "local" or case.ranks == 1:
        return Sent(0, 0.0, 0)
    gathers, sums = [MEETING], []
    if way == "gather":
        gathers.append(case.own * (case.inputs + case.outputs) * FLOAT)
    else:
        sums += [case.size * FLOAT] * (1 + PRODUCTS)  # the gradient, then the products
        sums += [2 * FLOAT, *[3 * FLOAT] * Primum.max_iters]  # lengths and curvatures
        sums += [3 * POINTS * FLOAT, 2 * FLOAT, POINTS * FLOAT]  # the certificate
        gathers.append(case.own * 3 * FLOAT)  # drift before and after, weights
    others = case.ranks - 1
    wire = others * sum(gathers) + ring(sum(sums), case.ranks)
    return Sent(sum(gathers) + sum(sums), wire, len(gathers) + len(sums))


def chosen(case: Case, trained: int | None = None) -> str:
    """The way of `scope="global"`, or of "auto" for a model with so many trained parameters."""
    cost = Cost(
        samples=case.batch,
        positions=1,
        inputs=case.inputs,
        outputs=case.outputs,
        ranks=case.ranks,
        products=PRODUCTS,
        factorises=case.optimizer == "sgd",
    )
    return choose_strategy(cost, trained)
