"""What several ranks cost: bytes, collectives, operations and memory of a step, as formulas.

`local`, `gather` and `sum` are the three ways of `primum.distributed`. All figures are of one rank
and one step; a batch is the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from primum import distributed, gram
from primum.distributed import choose_way, costs, traffic
from primum.pipeline import LARGE, Captured
from primum.ranks import Meeting
from primum.recipe import Primum

WAYS = ("local", "gather", "sum")
POINTS = Primum.max_iters + 2  # dual points that the solver compares, zero among them
PRODUCTS = Primum.max_iters + 1  # products with the Gram operator
MEETING = 5 * 8  # five whole numbers
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


@dataclass(frozen=True)
class Sent:
    """What a rank puts into the collectives of a step.

    Attributes:
        payload: Bytes: what `Ranks.bytes` counts.
        wire: Bytes that a rank sends, and receives, if rings carry them.
        collectives: How many.
    """

    payload: int
    wire: float
    collectives: int


def sent(way: str, case: Case) -> Sent:
    """Of every collective its payload; a gather passes it to all, a sum halves of it to and fro."""
    if way == "local" or case.ranks == 1:
        return Sent(0, 0.0, 0)
    rows = case.own * case.positions
    gathers, sums = [MEETING], [case.outputs * FLOAT]  # the bias's gradient, for clipping
    if way == "gather":
        gathers.append(rows * (case.inputs + case.outputs) * FLOAT)
    else:
        sums += [case.size * FLOAT] * (1 + PRODUCTS)  # the gradient, then the products
        sums += [2 * FLOAT, *[3 * FLOAT] * Primum.max_iters]  # lengths and curvatures
        sums += [2 * POINTS * FLOAT, FLOAT, 2 * POINTS * FLOAT]  # the certificate
        gathers.append(case.own * 3 * FLOAT)  # drift before and after, weights
    others = case.ranks - 1
    wire = others * sum(gathers) + 2 * others / case.ranks * sum(sums)
    return Sent(sum(gathers) + sum(sums), wire, len(gathers) + len(sums))


def problem_batch(way: str, case: Case) -> int:
    """Samples in the problem that a rank computes with."""
    return case.batch if way == "gather" else case.own


def is_dense(way: str, case: Case) -> bool:
    """Whether the Gram matrix of that many samples is formed."""
    if way == "sum":
        return False
    factorises = case.optimizer == "sgd" and case.positions == 1 and not in_blocks(way, case)
    return dense_is_cheaper(way, case, factorises=factorises)


def dense_is_cheaper(way: str, case: Case, *, factorises: bool) -> bool:
    """By the library's cost model."""
    sizes = problem_batch(way, case), case.positions, case.inputs + 1, case.outputs
    dense, free = gram.operations(*sizes, products=PRODUCTS, factorises=factorises)
    return dense <= free


def block_entries(way: str, case: Case) -> int:
    """Entries of the samples' gradients that are held at a time, where they are formed."""
    rows = (problem_batch(way, case), case.positions)
    rows = rows[:1] if case.positions == 1 else rows
    x, g = (torch.empty(*rows, n, device="meta") for n in (case.inputs + 1, case.outputs))
    first = next(gram.output_blocks(x, g))
    return first.stop * (case.inputs + 1) * problem_batch(way, case)


def in_blocks(way: str, case: Case) -> bool:
    """Whether the head is gone through a few outputs at a time."""
    if way == "sum" or (case.positions == 1 and case.size <= LARGE):
        return False
    return dense_is_cheaper(way, case, factorises=False)


def operations(way: str, case: Case) -> float:
    """Floating-point operations; with what is bound by memory counted eight times, as `gram` does.

    Gradient, drift and diagonal cost three products of the head's size, then comes the solver.
    """
    batch, rows = problem_batch(way, case), problem_batch(way, case) * case.positions
    basis = 3 * 2.0 * rows * case.size
    if not is_dense(way, case):
        return basis + PRODUCTS * 4.0 * rows * case.size
    if case.optimizer == "sgd" and case.positions == 1 and not in_blocks(way, case):
        build = batch**2 * (2.0 * (case.inputs + 1 + case.outputs) + 16)
    else:
        build = 2.0 * batch * case.size * (case.positions + batch + 8)
    return basis + build + PRODUCTS * 8.0 * batch**2


def memory(way: str, case: Case) -> int:
    """Bytes that the library holds at most, over the model, its gradients and the batch.

    Leading terms of three moments, the largest of which counts: predicting the step takes matrices
    of the head's size; iterating takes the rows (inputs with a column of ones and output gradients,
    scaled, and once more as products) or the Gram matrix; in the end the dual points are compared.
    How many of each was read off measurements. Summing holds some more of the head's size, in
    numbers that differ from run to run, so for it this is rough: mostly too much.
    """
    batch, adaptive = problem_batch(way, case), case.optimizer != "sgd"
    rows = batch * case.positions
    unit = rows * (case.inputs + 1 + case.outputs)
    # Alone, points are compared one by one, and at most these are kept.
    points = (6 * POINTS if way == "sum" else 2 * PRODUCTS) * batch
    extra = {
        "local": 0,
        "gather": rows * (case.inputs + 2 * case.outputs),  # all rows, and their gradients' share
        "sum": rows * case.outputs,
    }[way]
    if in_blocks(way, case):
        blocks = 2 * block_entries(way, case)
        return FLOAT * (extra + rows * (case.inputs + 1) + blocks + batch**2 + points)
    predicting = (6 if adaptive else 4) * case.size + unit
    heads = (3 if adaptive else 2) * case.size
    if way == "sum":
        heads = (11 if adaptive else 7) * case.size
    if not is_dense(way, case):
        solving = heads + max(2 * unit + 2 * POINTS * batch, unit + points)
    elif case.optimizer == "sgd" and case.positions == 1:
        solving = heads + unit + batch**2 + max(batch**2, points)
    else:
        formed, block = batch * case.size, block_entries(way, case)
        solving = heads + unit + batch**2
        solving += max(formed if formed <= block else 2 * block, points)
    return FLOAT * (extra + max(predicting, solving))


def arguments(case: Case) -> dict[str, int]:
    """Of `costs` and `traffic`."""
    return {
        "batch": case.batch,
        "positions": case.positions,
        "inputs": case.inputs,
        "outputs": case.outputs,
        "ranks": case.ranks,
    }


def chosen(case: Case) -> str:
    """The way that `scope="global"` takes."""
    sgd = case.optimizer == "sgd"
    gather, total = costs(**arguments(case), products=PRODUCTS, factorises=sgd)
    return "gather" if gather <= total else "sum"


def chosen_at(case: Case, per_byte: float, per_message: float) -> str:
    """The same if bytes and collectives cost that much, in floating-point operations."""
    with (
        mock.patch.object(distributed, "PER_BYTE", per_byte),
        mock.patch.object(distributed, "PER_MESSAGE", per_message),
    ):
        return chosen(case)


def library_traffic(way: str, case: Case) -> float:
    """What the library expects a rank to receive."""
    gather, total = traffic(**arguments(case), products=PRODUCTS)
    return {"local": 0.0, "gather": gather, "sum": total}[way]


def auto(case: Case, params: int) -> str:
    """The way that `scope="auto"` takes, for a model of that many parameters."""
    ranks: Any = SimpleNamespace(size=case.ranks)
    counts = (case.own,) * case.ranks
    positions = case.positions if case.positions > 1 else 0
    seen = Captured(torch.empty(1, case.inputs), torch.empty(1, case.outputs))
    sgd = case.optimizer == "sgd"
    meeting = Meeting(counts, positions, False, 0)
    way = choose_way(ranks, meeting, seen, Primum(), factorises=sgd, params=params)
    return way or "local"


def all_reduce(params: int, ranks: int) -> float:
    """Bytes that a rank sends for the gradients of a model, by a ring, in float32."""
    return 2 * (ranks - 1) / ranks * FLOAT * params
