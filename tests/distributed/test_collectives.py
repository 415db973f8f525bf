"""Which ranks solve together, and what they tell each other; see also test_distributed.py."""

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
from primum.distributed.collectives import Meeting, Ranks, Scope, meet


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
class TestRanks:
    def test_of_one(self) -> None:
        ranks = Ranks(None)
        assert (ranks.size, ranks.rank) == (1, 0)
        rows = torch.randn(3, 2)
        assert torch.equal(ranks.gather(rows.t().contiguous().t(), [3]), rows)
        assert torch.equal(ranks.sum(rows.clone()), rows)
        assert ranks.exchange([4, -1]) == [[4, -1]]
        assert ranks.bytes == 2 * rows.numel() * 4 + 2 * 8

    def test_numbers_of_the_host_stay_there_whatever_the_default_device(self) -> None:
        with torch.device("meta"):  # stands for torch.set_default_device("cuda")
            assert Ranks(None).exchange([4, -1]) == [[4, -1]]

    def test_a_collective_that_fails_is_remembered_and_raised(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("connection closed by peer")

        ranks = Ranks(None)
        assert not ranks.broken
        monkeypatch.setattr(dist, "all_reduce", lost)
        with pytest.raises(RuntimeError, match="closed by peer"):
            ranks.sum(torch.empty(1))
        assert ranks.broken

    def test_meet(self) -> None:
        ranks = Ranks(None)
        assert meet(ranks, torch.empty(3, 4), False) == (Meeting((3,), 0, False, 0), [0])
        assert meet(ranks, torch.empty(3, 5, 4), True, 4) == (Meeting((3,), 5, True, 0), [4])
        assert meet(ranks, None, False, 3) == (None, [3])  # trouble here

    @pytest.mark.parametrize(
        ("calls", "positions", "counts"), [(1, 0, (18, 40)), (2, 2, (9, 20)), (6, 6, (3, 5))]
    )
    def test_meeting_of_tokens(self, calls: int, positions: int, counts: tuple[int, ...]) -> None:
        """Several calls of the head for the same tokens are positions of each."""
        lengths = (6, 8) if calls < 6 else (6, 6)
        found = Meeting((3, 5), max(lengths), False, 1, lengths).of_tokens(calls)
        assert found == Meeting(counts, positions, False, 1)
        assert found.own == slice(counts[0], sum(counts))

    def test_scope_of_one_rank_is_alone(self) -> None:
        model, _ = make()
        assert Scope("global", None, model).ranks() is None
        assert Scope("auto", None, nn.parallel.DistributedDataParallel(model)).ranks() is None


def test_own_rows() -> None:
    assert [Meeting((3, 0, 4), 0, False, rank).own for rank in range(3)] == [
        slice(0, 3),
        slice(3, 3),
        slice(3, 7),
    ]


class TestScope:
    @pytest.mark.parametrize("scope", ["all", None, ""])
    def test_unknown(self, scope: Any) -> None:
        model, optimizer = make()
        with pytest.raises(ValueError, match='scope must be "auto", "global" or "local", got'):
            primum.attach(model, optimizer, scope=scope)
        assert not model[2]._forward_hooks

    def test_global_needs_ranks(self) -> None:
        model, optimizer = make()
        with pytest.raises(ValueError, match="init_process_group"):
            primum.attach(model, optimizer, scope="global")
        assert not model[2]._forward_hooks

    def test_group_without_effect(self, tmp_path: Path) -> None:
        model, optimizer = make()
        dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        try:
            with pytest.raises(ValueError, match="process_group has no effect"):
                primum.attach(
                    model,
                    optimizer,
                    scope="local",
                    process_group=dist.distributed_c10d._get_default_group(),
                )
            reducer = primum.attach(model, optimizer, scope="global")  # of one rank
            nn.functional.cross_entropy(
                model(torch.randn(6, 6).double()), torch.randint(4, (6,))
            ).backward()
            assert reducer.last is not None
            assert reducer.last.applied
        finally:
            dist.destroy_process_group()
