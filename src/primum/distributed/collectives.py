"""A process group, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")

# Newer versions of torch have it under the first name, and warn about the second.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_reduce_scatter: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)


def world_size() -> int:
    """Number of ranks of the default process group; 0 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


class Collectives:
    """A process group, and what is asked of it.

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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        self._call(tensor, lambda: dist.all_reduce(tensor, group=self._group))
        return tensor

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

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
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
