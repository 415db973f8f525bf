"""The problem of the global batch, the same on every rank.

Under data parallelism the step is made of the mean of the ranks' gradients, so a sample's share of
it is its gradient divided by the number of ranks. Two exact ways to the global problem, and one
without exchange:

    gather   the head's input and output gradients of all samples, once, to every rank; each solves
             the whole problem and keeps its own rows
    sum      no sample leaves its rank: every Gram product needs the sum of one head-sized matrix,
             and nothing of the size of the global batch squared exists anywhere; where the samples
             of all ranks do not fit on one
    local    each rank solves for its own samples (the paper's relaxation)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from primum.distributed.collectives import Collectives, rows_of_rank
from primum.distributed.fsdp2 import HeadShard
from primum.distributed.scope import Scope
from primum.kernel.batch import HeadBatch, rows_of
from primum.kernel.builder import Builder, whole_problem
from primum.kernel.gram import MatrixFree, choose_form, operations
from primum.kernel.head import Head, Plain
from primum.kernel.problem import Solution, StepProblem
from primum.kernel.recipe import Recipe

# What `scope="auto"` may cost: of the bytes that training sends for the gradients itself, and times
# the operations of each rank by itself. Costs below 1 MiB or 1e10 operations are ignored.
AFFORDABLE, FEW_BYTES = 0.25, 1 << 20
REPEATED, FEW_OPERATIONS = 16, 10**10

# Samples of all ranks fit on one if they take no more memory than eight heads or 1 GiB.
HEADS_HELD, FEW_HELD = 8, 1 << 30


@dataclass(frozen=True)
class Meeting:
    """What all ranks know of each other in a pass.

    Attributes:
        rows: First dimension of the inputs, by rank.
        positions: Of each row, by rank; 0 if inputs have no such dimension.
        before: Whether any rank has accumulated gradients.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    before: bool

    def counts(self, per: str, calls: int) -> list[int]:
        """How many get a weight, by rank, if each of the `calls` of the head saw the same ones."""
        if per == "sample":
            return list(self.rows)
        pairs = zip(self.rows, self.positions, strict=True)
        return [rows * max(positions // calls, 1) for rows, positions in pairs]


class OverRanks(Builder):
    """Builds the problem of all ranks where a pass has peers, and by `alone` where it has none.

    Args:
        alone: Builds the problem of one process.
        scope: Which processes solve together.
        divisor: What the sum of the ranks' gradients is divided by, if not their number.
        warn: Takes a kind and a message.
    """

    def __init__(
        self,
        alone: Builder,
        scope: Scope,
        warn: Callable[[str, str], None],
        divisor: Callable[[], float] | None = None,
    ) -> None:
        self._alone, self._scope, self._warn, self._divisor = alone, scope, warn, divisor
        self._exact = Builder()  # over ranks nothing is approximated
        self._peers: Collectives | None = None
        self._meeting: Meeting | None = None
        self._met = self._summed = False
        self._calls, self._trained = 1, 0

    @property
    def broken(self) -> bool:  # type: ignore[override]
        return self._scope.broken

    def begin(self, peers: object) -> None:
        assert peers is None or isinstance(peers, Collectives)
        self._peers, self._meeting = peers, None
        self._met = self._summed = False
        why = self._scope.why_alone() if peers is None else None
        if why is not None:
            self._warn(*why)

    def again(self, peers: object) -> object:
        """Of a sharded head all ranks run every call; else some may call it less often."""
        return peers if self._scope.sharded else None

    def agree(self, head: Head, inputs: Sequence[Tensor], vote: int) -> Sequence[int]:
        if self._peers is None:
            return [vote]
        own, self._calls = rows_of(inputs, "sample"), len(inputs)
        positions = own.shape[1] if own.dim() == 3 else 0
        table = self._exchange(1, len(own), positions, own.dim(), head.holds_gradients, vote)
        if not all(row[0] for row in table) or len({row[3] for row in table}) > 1:
            raise Plain("another rank could not compute its weights")
        rows, positions_of, before = ([row[i] for row in table] for i in (1, 2, 4))
        self._meeting = Meeting(tuple(rows), tuple(positions_of), any(before))
        return [row[5] for row in table]

    def _exchange(self, *numbers: int) -> list[list[int]]:
        assert self._peers is not None
        self._met = True
        return self._peers.exchange([int(number) for number in numbers])

    def abort(self) -> None:
        if self._peers is not None and not self._met:
            self._exchange(0, 0, 0, 0, 0, 0)
        elif self._peers is not None and self._summed:
            self._peers.broken = True  # the others wait in a product

    def build(self, head: Head, batch: HeadBatch, recipe: Recipe) -> StepProblem:
        peers, meeting = self._peers, self._meeting
        if peers is None or meeting is None:
            return self._alone.build(head, batch, recipe)
        counts = meeting.counts(batch.per, self._calls)
        positions = max(meeting.positions) if batch.inputs.dim() == 3 else 1
        strategy = self._strategy(peers, head, batch, recipe, sum(counts), max(positions, 1))
        if strategy == "local" and not self._scope.sharded:
            return self._alone.build(head, batch, recipe)
        divisor = peers.size if self._divisor is None else self._divisor()
        share = torch.full((), 1 / divisor, dtype=batch.dtype, device=batch.output_grads.device)
        unscale = share if batch.unscale is None else batch.unscale * share
        shared = replace(batch, unscale=unscale)
        with peers.waited_for():
            shared = replace(shared, before=self._before(head, peers, meeting, share, batch))
            if strategy == "gather":
                everyone = _gathered(peers, counts, positions, shared)
            else:
                x, g = shared.features(head.trained), shared.grads()
                total = peers.all_reduce(g.flatten(0, -2).t() @ x.flatten(0, -2))
                update = head.update(total, shared)
        own = rows_of_rank(counts, peers.rank)
        if strategy == "gather":
            with peers.waited_for() if self._scope.sharded else nullcontext():
                return replace(self._exact.build(head, everyone, recipe), own=own)
        if strategy == "sum":
            self._summed = True
            return whole_problem(
                *(head, shared, recipe, update, x, g),
                all_reduce=peers.all_reduce,
                samples=sum(counts),
            )
        problem = whole_problem(head, batch, recipe, update, x, batch.grads())
        assert isinstance(problem.gram, MatrixFree)
        chosen = choose_form(problem.gram, recipe.products) if recipe.products else problem.gram
        return replace(problem, gram=chosen)

    def finish(self, problem: StepProblem, solution: Solution) -> tuple[StepProblem, Solution]:
        """Drift and weights of all samples, where each rank has those of its own."""
        if not self._summed or self._peers is None or self._meeting is None:
            return problem, solution
        counts = self._meeting.counts(problem.per, self._calls)
        vectors = (problem.drift, solution.drift_after, solution.extra_weights)
        drift, after, weights = self._peers.gather(torch.stack(vectors, 1), counts).unbind(1)
        self._summed = False
        own = rows_of_rank(counts, self._peers.rank)
        return (
            replace(problem, drift=drift, own=own),
            replace(solution, extra_weights=weights, drift_after=after),
        )

    def _before(
        self, head: Head, peers: Collectives, meeting: Meeting, share: Tensor, batch: HeadBatch
    ) -> Tensor | float | None:
        """What earlier passes have left, over all ranks; of a sharded head, of its own rows."""
        if isinstance(head, HeadShard):
            return head.reduced(batch.dtype, share, waits=meeting.before)
        if not meeting.before:
            return 0.0
        if batch.before is not None:
            own: Tensor | float | None = batch.before
        else:
            own = head.accumulated(batch.dtype)
        if not isinstance(own, Tensor):
            outputs, inputs = head.shape
            own = share.new_zeros(outputs, inputs + ("bias" in head.trained))
        return peers.all_reduce(own * share)

    def _strategy(
        self,
        peers: Collectives,
        head: Head,
        batch: HeadBatch,
        recipe: Recipe,
        samples: int,
        positions: int,
    ) -> str:
        """The way to the problem, the same on every rank."""
        if self._scope.name == "local":
            return "local"
        if not self._trained:
            groups = head.optimizers["weight"].param_groups
            self._trained = sum(p.numel() for group in groups for p in group["params"])
        cost = Cost(
            samples=samples,
            positions=positions,
            inputs=batch.inputs.shape[-1],
            outputs=batch.output_grads.shape[-1],
            ranks=peers.size,
            products=recipe.products,
            factorises=head.one_gain,
            itemsize=batch.output_grads.element_size(),
        )
        strategy = choose_strategy(cost, self._trained if self._scope.name == "auto" else None)
        if strategy == "local":
            self._warn(
                "dear",
                "solving over all ranks would send more than a quarter of the gradient "
                "all-reduce's traffic, or repeat too much work on each rank, so each rank solves "
                'for its own samples; pass scope="global" to solve jointly anyway, or '
                'scope="local" to silence this',
            )
        return strategy


def _gathered(
    peers: Collectives, counts: Sequence[int], positions: int, batch: HeadBatch
) -> HeadBatch:
    """Inputs and output gradients of the samples of all ranks."""
    inputs, grads = batch.inputs, batch.output_grads
    if inputs.dim() == 3 and positions > inputs.shape[1]:
        missing = (0, 0, 0, positions - inputs.shape[1])  # zeros count for nothing
        inputs, grads = nn.functional.pad(inputs, missing), nn.functional.pad(grads, missing)
    if inputs.dtype == grads.dtype:
        both = peers.gather(torch.cat((inputs, grads), -1), counts)
        inputs, grads = torch.split(both, [inputs.shape[-1], grads.shape[-1]], -1)
    else:
        inputs, grads = peers.gather(inputs, counts), peers.gather(grads, counts)
    return replace(batch, inputs=inputs, output_grads=grads)


@dataclass(frozen=True)
class Cost:
    """What the global problem costs, from sizes alone, so that every rank decides alike.

    Attributes:
        samples: Of all ranks.
        positions: Of a sample; 1 if it has none.
        inputs: Of the head.
        outputs: Of the head.
        ranks: That train together.
        products: With the Gram operator, by the recipe; 0 if it needs the samples themselves.
        factorises: Whether the gain is one number for all outputs.
        itemsize: Bytes of an entry of what is gathered.
    """

    samples: int
    positions: int
    inputs: int
    outputs: int
    ranks: int
    products: int
    factorises: bool = False
    itemsize: int = 4

    @property
    def holdable(self) -> bool:
        """Whether the samples of all ranks, in float32, fit beside the head on every rank."""
        held = 4 * self.samples * self.positions * (self.inputs + self.outputs)
        return held <= max(FEW_HELD, HEADS_HELD * 4 * self.inputs * self.outputs)

    @property
    def gathered(self) -> float:
        """Bytes that one rank receives by "gather"."""
        others = self.samples - self.samples / self.ranks
        return others * self.positions * (self.inputs + self.outputs) * self.itemsize

    @property
    def summed(self) -> float:
        """Bytes that one rank receives by "sum": the gradient, and one matrix for each product."""
        return (self.products + 1) * ring(4 * self.inputs * self.outputs, self.ranks)

    def work(self, samples: int) -> int:
        """Operations of one process that solves for so many samples."""
        sizes = max(samples, 1), self.positions, self.inputs, self.outputs
        products = max(self.products, 1)
        return min(operations(*sizes, products=products, factorises=self.factorises))


def choose_strategy(cost: Cost, trained: int | None = None) -> str:
    """ "gather", or "sum" where samples do not fit; "local" where it costs more than `AFFORDABLE`.

    `trained` is the number of trained parameters, whose all-reduce the cost is compared with; None
    if it may cost what it wants.
    """
    gather, summed = cost.holdable or not cost.products, cost.products > 0
    if trained is not None:
        affordable = max(FEW_BYTES, AFFORDABLE * ring(4 * trained, cost.ranks))
        alone = cost.work(cost.samples // cost.ranks)
        repeated = cost.work(cost.samples) > max(FEW_OPERATIONS, REPEATED * alone)
        gather = gather and cost.gathered <= affordable and not repeated
        summed = summed and cost.summed <= affordable
    return "gather" if gather else "sum" if summed else "local"


def ring(size: float, ranks: int) -> float:
    """Bytes that one rank receives in an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size
