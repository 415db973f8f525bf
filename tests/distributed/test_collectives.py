"""Process groups of one rank, what ranks know of each other, and which `scope` is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import primum
from loops import make
from primum.distributed.collectives import Collectives, chunks, rows_of_rank
from primum.distributed.over_ranks import Meeting
from primum.distributed.scope import Scope


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
class TestOneRank:
    def test_collectives(self) -> None:
        ranks = Collectives(None)
        assert (ranks.size, ranks.rank) == (1, 0)
        rows = torch.randn(3, 2)
        assert torch.equal(ranks.gather(rows.t().contiguous().t(), [3]), rows)
        assert torch.equal(ranks.all_reduce(rows.clone()), rows)
        assert ranks.exchange([4, -1]) == [[4, -1]]
        assert ranks.bytes == 2 * rows.numel() * 4 + 2 * 8

    def test_numbers_of_the_host_stay_there_whatever_the_default_device(self) -> None:
        with torch.device("meta"):  # stands for torch.set_default_device("cuda")
            assert Collectives(None).exchange([4, -1]) == [[4, -1]]

    def test_a_collective_that_fails_is_remembered_and_raised(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("connection closed by peer")

        ranks = Collectives(None)
        assert not ranks.broken
        monkeypatch.setattr(dist, "all_reduce", lost)
        with pytest.raises(RuntimeError, match="closed by peer"):
            ranks.all_reduce(torch.empty(1))
        assert ranks.broken

    def test_scope_is_alone(self) -> None:
        model, _ = make()
        wrapped = nn.parallel.DistributedDataParallel(model)
        group = dist.distributed_c10d._get_default_group()
        for scope in (Scope("global", model), Scope(group, model), Scope("auto", wrapped)):
            assert scope.peers(eager=True) is None
            assert scope.peers(eager=False) is None
            assert scope.why_alone() is None

    @pytest.mark.parametrize("scope", ["global", "group"])
    def test_weights_are_computed(self, scope: Any) -> None:
        model, optimizer = make()
        if scope == "group":
            scope = dist.distributed_c10d._get_default_group()
        reducer = primum.attach(model, optimizer, scope=scope)
        inputs, labels = torch.randn(6, 6).double(), torch.randint(4, (6,))
        nn.functional.cross_entropy(model(inputs), labels).backward()
        assert reducer.last is not None
        assert reducer.last.applied


def test_rows_of_ranks() -> None:
    assert [rows_of_rank([3, 0, 4], rank) for rank in range(3)] == [
        slice(0, 3),
        slice(3, 3),
        slice(3, 7),
    ]
    assert chunks(5, 4) == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("per", "calls", "positions", "counts"),
    [
        ("sample", 1, (6, 8), [3, 5]),
        ("token", 1, (6, 8), [18, 40]),
        ("token", 2, (6, 8), [9, 20]),
        ("token", 6, (6, 6), [3, 5]),
        ("token", 1, (0, 0), [3, 5]),
    ],
)
def test_counts(per: str, calls: int, positions: tuple[int, ...], counts: list[int]) -> None:
    """Several calls of the head for the same tokens are positions of each."""
    assert Meeting((3, 5), positions, False).counts(per, calls) == counts


@pytest.mark.parametrize("scope", ["all", ""])
def test_unknown_scope(scope: str) -> None:
    model, optimizer = make()
    expected = 'scope must be "auto", "global", "local" or a process group, got'
    with pytest.raises(ValueError, match=expected):
        primum.attach(model, optimizer, scope=scope)
    assert not model[2]._forward_hooks


def test_global_needs_ranks() -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match="init_process_group"):
        primum.attach(model, optimizer, scope="global")
    assert not model[2]._forward_hooks
