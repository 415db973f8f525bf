"""Several ranks: which of them solve together, what they know of each other, what they send."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from primum.compat import joins, knows_running_wrapper, running_wrapper

Result = TypeVar("Result")

# Newer versions of torch have it under the first name, and warn about the second.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_reduce_scatter: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)

Wrapper = nn.parallel.DistributedDataParallel


def world_size() -> int:
    """Number of ranks of the default process group; 0 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


class Scope:
    """Which ranks a backward pass is weighed with: decided in every forward pass.

    "local": none. "global": those of the group. "auto": those over which the
    DistributedDataParallel that runs this pass averages its gradients, if any does.

    Of a sharded head, `mesh` are the ranks that hold it, and no pass does without them.
    """

    def __init__(
        self,
        scope: str,
        group: dist.ProcessGroup | None,
        model: nn.Module,
        mesh: Ranks | None = None,
    ) -> None:
        if scope not in ("auto", "global", "local"):
            raise ValueError(f'scope must be "auto", "global" or "local", got {scope!r}')
        if group is not None and scope == "local":
            raise ValueError('process_group has no effect with scope="local"')
        if scope == "global" and not world_size():
            raise ValueError(
                'scope="global" needs ranks: call torch.distributed.init_process_group first'
            )
        if group is not None and mesh is not None:
            raise ValueError(
                "process_group has no effect on a sharded head: the mesh of fully_shard "
                "determines which ranks solve together; leave it out"
            )
        self.name = scope
        self._group = group
        self._ranks: Ranks | None = mesh
        self._sharded = mesh is not None
        self._failed = False
        self._ddp = next(
            (weakref.ref(each) for each in model.modules() if isinstance(each, Wrapper)), None
        )
        if scope == "global" and mesh is None:
            self._ranks = self._of(self._wrapper())

    def ranks(self, *, eager: bool = False) -> Ranks | None:
        """The ranks of the forward pass under way; None if this one is on its own.

        In an `eager` pass that no DistributedDataParallel runs (`wrapper.module(x)` on one rank),
        "auto" does not wait for others.
        """
        if self._sharded:
            return self._ranks if self._ranks is not None and self._ranks.size > 1 else None
        if self.name == "local" or not world_size():
            return None
        wrapper = self._wrapper()
        if eager and self.name == "auto" and knows_running_wrapper() and not running_wrapper():
            return None
        if wrapper is not None and joins(wrapper):
            return None  # ranks without data left make no collective calls
        if self._ranks is None and wrapper is not None:
            self._ranks = self._of(wrapper)
        if self._ranks is None or self._ranks.size == 1:
            return None
        return self._ranks

    def why_alone(self) -> tuple[str, str] | None:
        """A kind and a message, if a user may have expected ranks where there are none."""
        if self.name == "local" or self._sharded or not world_size():
            return None
        wrapper = self._wrapper()
        if wrapper is not None and joins(wrapper):
            return "join", (
                "each rank solves for its own samples under join(): a rank that has run out of "
                "data makes no collective calls"
            )
        if self._ranks is None and wrapper is None and world_size() > 1:
            return "ranks", (
                "there are several ranks, but this model does not seem to run in "
                "DistributedDataParallel, so each rank solves for its own samples; pass the "
                'wrapped model to attach, or set scope="local" or scope="global"'
            )
        return None

    def _wrapper(self) -> Wrapper | None:
        running = running_wrapper()
        if running is not None or self._ddp is None:
            return running
        return self._ddp()

    @property
    def wrapped(self) -> bool:
        """Whether a DistributedDataParallel over several ranks is known."""
        return world_size() > 1 and self._wrapper() is not None

    @property
    def broken(self) -> bool:
        """Whether an error is the process group's own, and not to be swallowed."""
        return self._failed or (self._ranks is not None and self._ranks.broken)

    def _of(self, wrapper: Wrapper | None) -> Ranks:
        group = self._group
        if group is None and wrapper is not None:
            group = wrapper.process_group
        self._failed = True  # unless all ranks come along
        made = Ranks(group)
        self._failed = False
        return made


class Ranks:
    """A process group, and what we ask of it.

    Attributes:
        size: Number of ranks.
        bytes: Payload this rank has put into collectives, so far.
        broken: Whether a collective has failed, or this rank has left others waiting in one: an
            error not to be swallowed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.bytes = 0
        self.broken = False
        self._host: Any = group
        if "gloo" not in dist.get_backend(group):
            # Small numbers for the host travel from host to host: no device is waited for.
            ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            self._host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Whole numbers of every rank, in the order of ranks."""
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everyone = own.new_empty(self.size * len(numbers))
        self._call(own, lambda: _all_gather(everyone, own, group=self._host))
        table: list[list[int]] = everyone.view(self.size, -1).tolist()
        return table

    def sum(self, tensor: Tensor) -> Tensor:
        """Over ranks, in place."""
        self._call(tensor, lambda: dist.all_reduce(tensor, group=self._group))
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return self.sum(tensor / self.size)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks, in the order of ranks. [counts[rank], ...] -> [sum(counts), ...]."""
        most = max(counts)
        if len(rows) < most:
            rows = torch.cat((rows, rows.new_zeros(most - len(rows), *rows.shape[1:])))
        own, everyone = rows.contiguous(), rows.new_empty(self.size * most, *rows.shape[1:])
        self._call(own, lambda: _all_gather(everyone, own, group=self._group))
        if min(counts) == most:
            return everyone
        parts = [everyone.narrow(0, rank * most, count) for rank, count in enumerate(counts)]
        return torch.cat(parts)

    def scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks. [sum(counts), ...] -> [counts[rank], ...].

        `counts` as `chunks` makes them.
        """
        most = max(counts)
        missing = self.size * most - len(rows)
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
        own, sent = rows.new_empty(most, *rows.shape[1:]), rows.contiguous()
        self._call(sent, lambda: _reduce_scatter(own, sent, group=self._group))
        return own.narrow(0, 0, counts[self.rank])

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """A block in which the others wait for this rank: an error must not be swallowed."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def _call(self, sent: Tensor, collective: Callable[[], Result]) -> Result:
        self.bytes += sent.numel() * sent.element_size()
        with self.waited_for():
            return collective()


def chunks(rows: int, ranks: int) -> list[int]:
    """How many of the rows each rank gets, as `torch.chunk` and `fully_shard` split them."""
    most = -(-rows // ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def rows_of_rank(counts: Sequence[int], rank: int) -> slice:
    """Which rows a rank has, if all have as many as in `counts`, in the order of ranks."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


@dataclass(frozen=True)
class Meeting:
    """What all ranks know of each other in this backward pass.

    Attributes:
        counts: Samples by rank.
        positions: The longest sample's; 0 if inputs have no such dimension.
        before: Whether any rank has accumulated gradients.
        rank: This rank.
        lengths: Positions by rank.
    """

    counts: tuple[int, ...]
    positions: int
    before: bool
    rank: int
    lengths: tuple[int, ...] = field(default=(), compare=False)

    @property
    def own(self) -> slice:
        return rows_of_rank(self.counts, self.rank)

    def of_tokens(self, calls: int) -> Meeting:
        """The same, if every position of each call of the head is a sample of its own."""
        pairs = zip(self.counts, self.lengths, strict=True)
        counts = tuple(rows * max(each // calls, 1) for rows, each in pairs)
        return replace(self, counts=counts, positions=calls if calls > 1 else 0)


def meet(
    ranks: Ranks, features: Tensor | None, before: bool, vote: int = 0
) -> tuple[Meeting | None, list[int]]:
    """Exchange what each rank has, and how each votes on `per="auto"` (see `positions.py`).

    The meeting is None if any of them, this one included, has nothing to weigh. Every rank calls
    this, in every backward pass through the head, whatever has happened to it.
    """
    rows, positions, kind = 0, 0, 0
    if features is not None:
        rows, kind = len(features), features.dim()
        positions = features.shape[1] if kind == 3 else 0
    table = ranks.exchange([features is not None, rows, positions, kind, before + 2 * vote])
    votes = [row[4] // 2 for row in table]
    if not all(row[0] for row in table) or len({row[3] for row in table}) > 1:
        return None, votes
    meeting = Meeting(
        counts=tuple(row[1] for row in table),
        positions=max(row[2] for row in table),
        before=any(row[4] % 2 for row in table),
        rank=ranks.rank,
        lengths=tuple(row[2] for row in table),
    )
    return meeting, votes
