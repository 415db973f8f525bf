"""Cost of several ranks: formulas for bytes, collectives, FLOPs and memory of a step.

`local`, `gather`, `rows` and `sum` are the ways of `primum.distributed`; sharded heads also use
`rows`. All values are for one rank and one step; a batch is the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from primum import gram, ways
from primum.kernel.builder import LARGE
from primum.kernel.recipe import Primum
from primum.distributed.over_ranks import Sizes, choose_way

WAYS = ("local", "gather", "rows", "sum")
POINTS = Primum.max_iters + 2  # dual points that the solver compares, zero among them
PRODUCTS = Primum.max_iters + 1  # products with the Gram operator
MEETING = 5 * 8  # five integers
FLOAT = 4


@dataclass(frozen=True)
class Case:
    """A head with a bias and a global batch, split evenly over ranks, in float32."""

    inputs: int
    outputs: int
    batch: int
    ranks: int = 1
    optimizer: str = "sgd"
    positions: int = 1

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

    @property
    def own_outputs(self) -> int:
        """Outputs of the head per rank, if they are divided among ranks."""
        return -(-self.outputs // self.ranks)


@dataclass(frozen=True)
class Sent:
    """Traffic of one rank in the collectives of a step.

    Attributes:
        payload: Bytes as `Ranks.bytes` counts them.
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
    rows = case.own * case.positions
    gathers, sums = [MEETING], [case.outputs * FLOAT]  # the bias's gradient, for clipping
    if way in ("gather", "rows"):
        gathers.append(rows * (case.inputs + case.outputs) * FLOAT)
    if way == "rows":
        batch = case.own * case.ranks
        each = batch * batch if is_dense(way, case) else batch  # the matrix, or its diagonal
        sums.append((batch + 1 + each) * FLOAT)
        sums += [] if is_dense(way, case) else [batch * FLOAT] * PRODUCTS
    elif way == "sum":
        sums += [case.size * FLOAT] * (1 + PRODUCTS)  # the gradient, then the products
        sums += [2 * FLOAT, *[3 * FLOAT] * Primum.max_iters]  # lengths and curvatures
        sums += [2 * POINTS * FLOAT, FLOAT, 2 * POINTS * FLOAT]  # the certificate
        gathers.append(case.own * 3 * FLOAT)  # drift before and after, weights
    others = case.ranks - 1
    wire = others * sum(gathers) + ways.ring(sum(sums), case.ranks)
    return Sent(sum(gathers) + sum(sums), wire, len(gathers) + len(sums))


def problem_batch(way: str, case: Case) -> int:
    """Samples in the problem that a rank computes with."""
    return case.batch if way in ("gather", "rows") else case.own


def is_dense(way: str, case: Case) -> bool:
    """Whether the Gram matrix of that many samples is formed."""
    if way == "sum":
        return False
    if way == "rows":
        return sizes_of(case).rows_are_dense
    factorises = case.optimizer == "sgd" and case.positions == 1 and not in_blocks(way, case)
    return dense_is_cheaper(way, case, factorises=factorises)


def dense_is_cheaper(way: str, case: Case, *, factorises: bool) -> bool:
    """Whether the library's cost model prefers the dense form."""
    sizes = problem_batch(way, case), case.positions, case.inputs + 1, case.outputs
    dense, free = gram.operations(*sizes, products=PRODUCTS, factorises=factorises)
    return dense <= free


def block_entries(way: str, case: Case) -> int:
    """Entries of per-sample gradients held at a time, if they are formed."""
    rows = (problem_batch(way, case), case.positions)
    rows = rows[:1] if case.positions == 1 else rows
    outputs = case.own_outputs if way == "rows" else case.outputs
    x, g = (torch.empty(*rows, n, device="meta") for n in (case.inputs + 1, outputs))
    first = next(gram.output_blocks(x, g))
    return first.stop * (case.inputs + 1) * problem_batch(way, case)


def in_blocks(way: str, case: Case) -> bool:
    """Whether the head is processed in blocks of outputs."""
    if way in ("rows", "sum") or (case.positions == 1 and case.size <= LARGE):
        return False
    return dense_is_cheaper(way, case, factorises=False)


def operations(way: str, case: Case) -> float:
    """FLOPs; memory-bound ones count eight times, as in `primum.gram`.

    Gradient, drift and diagonal cost three products of the head's size, plus the solver.
    """
    batch, rows = problem_batch(way, case), problem_batch(way, case) * case.positions
    outputs = case.own_outputs if way == "rows" else case.outputs
    size = (case.inputs + 1) * outputs
    basis = 3 * 2.0 * rows * size
    if not is_dense(way, case):
        return basis + PRODUCTS * 4.0 * rows * size
    if case.optimizer == "sgd" and case.positions == 1 and not in_blocks(way, case):
        build = batch**2 * (2.0 * (case.inputs + 1 + outputs) + 16)
    else:
        build = 2.0 * batch * size * (case.positions + batch + 8)
    return basis + build + PRODUCTS * 8.0 * batch**2


def memory(way: str, case: Case) -> int:
    """Peak bytes of the library, beyond the model, its gradients and the batch.

    The maximum of the leading terms of three phases: predicting the step takes matrices of the
    head's size; iterating takes the rows (inputs with a column of ones and output gradients,
    scaled, and once more as products) or the Gram matrix; finally the dual points are compared. The
    number of each was determined from measurements. Summing holds further matrices of the head's
    size, whose number varies from run to run: there this is rough, and mostly too high.
    """
    batch, adaptive = problem_batch(way, case), case.optimizer != "sgd"
    rows = batch * case.positions
    outputs = case.own_outputs if way == "rows" else case.outputs
    unit, size = rows * (case.inputs + 1 + outputs), (case.inputs + 1) * outputs
    # Except for `sum`, points are compared one by one, and at most this many are kept.
    points = (6 * POINTS if way == "sum" else 2 * PRODUCTS) * batch
    extra = {
        "local": 0,
        "gather": rows * (case.inputs + 2 * case.outputs),  # all rows, and their gradients' share
        "rows": rows * (case.inputs + case.outputs + 2 * outputs),
        "sum": rows * case.outputs,
    }[way]
    if in_blocks(way, case):
        blocks = 2 * block_entries(way, case)
        return FLOAT * (extra + rows * (case.inputs + 1) + blocks + batch**2 + points)
    predicting = (6 if adaptive else 4) * size + unit
    heads = (3 if adaptive else 2) * size
    if way == "sum":
        heads = (11 if adaptive else 7) * case.size
    if not is_dense(way, case):
        solving = heads + max(2 * unit + 2 * POINTS * batch, unit + points)
    elif case.optimizer == "sgd" and case.positions == 1:
        solving = heads + unit + batch**2 + max(batch**2, points)
    else:
        formed, block = batch * size, block_entries(way, case)
        solving = heads + unit + batch**2
        solving += max(formed if formed <= block else 2 * block, points)
    return FLOAT * (extra + max(predicting, solving))


def sizes_of(case: Case, holders: int | None = None) -> Sizes:
    """The sizes as the library's cost model takes them."""
    sizes = case.batch, case.positions, case.inputs, case.outputs, case.ranks
    return Sizes(*sizes, PRODUCTS, factorises=case.optimizer == "sgd", holders=holders)


def chosen(case: Case) -> str:
    """The way that `scope="global"` chooses."""
    return choose_way(sizes_of(case)) or "local"


def chosen_at(case: Case, per_byte: float, per_message: float) -> str:
    """The same with these costs of a byte and of a collective, in FLOPs."""
    with (
        mock.patch.object(ways, "PER_BYTE", per_byte),
        mock.patch.object(ways, "PER_MESSAGE", per_message),
    ):
        return chosen(case)


def auto(case: Case, params: int) -> str:
    """The way that `scope="auto"` chooses for a model with `params` parameters."""
    return choose_way(sizes_of(case), params) or "local"


def sharded(case: Case, params: int | None) -> str:
    """The same for a head sharded by `fully_shard`; `params` None for `scope="global"`."""
    return choose_way(sizes_of(case, holders=case.ranks), params) or "local"
