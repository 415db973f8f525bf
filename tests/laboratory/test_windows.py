"""Windows of text: each token once per epoch, its target the token after it."""

from __future__ import annotations

import doctest

import pytest
import torch

from lab import windows
from lab.images import DataError
from lab.windows import Windows

TOKENS = torch.arange(1000)


def test_the_target_is_the_token_that_follows() -> None:
    for batch in Windows(TOKENS, length=7, batch_size=5, seed=3).epoch(2):
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert torch.equal(batch.inputs - batch.inputs[:, :1], torch.arange(7).expand(5, 7))


def test_an_epoch_has_each_token_at_most_once_and_almost_all() -> None:
    made = Windows(TOKENS, length=10, batch_size=3, seed=0)
    seen = torch.cat([batch.inputs.flatten() for batch in made.epoch(0)])
    assert len(seen) == len(seen.unique()) == 10 * 3 * len(made) == 990


def test_every_first_token_fits() -> None:
    """Whatever the shift, the last window's last target is inside."""
    made = Windows(torch.arange(30), length=10, batch_size=2, seed=0)
    firsts = set()
    for epoch in range(60):
        (batch,) = made.epoch(epoch)
        firsts.add(int(batch.inputs.min()) % 10)
        assert int(batch.targets.max()) <= 29
    assert firsts == set(range(10))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def first(seed: int, epoch: int) -> torch.Tensor:
        return next(Windows(TOKENS, length=8, batch_size=4, seed=seed).epoch(epoch)).inputs

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_taken_up_in_the_middle_and_by_workers() -> None:
    made = Windows(TOKENS, length=8, batch_size=16, seed=1)
    whole = [batch.inputs for batch in made.epoch(0)]
    rest = [batch.inputs for batch in made.epoch(0, first_step=3)]
    assert all(torch.equal(*pair) for pair in zip(whole[3:], rest, strict=True))
    helped = Windows(TOKENS, length=8, batch_size=16, seed=1, workers=1)
    assert all(
        torch.equal(one, two.inputs) for one, two in zip(whole, helped.epoch(0), strict=True)
    )


def test_ranks_share_a_batch() -> None:
    whole = next(Windows(TOKENS, length=8, batch_size=4).epoch(0)).inputs
    parts = [
        next(Windows(TOKENS, length=8, batch_size=4, rank=rank, ranks=2).epoch(0)).inputs
        for rank in range(2)
    ]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)


def test_held_out_text_is_read_from_start_to_end() -> None:
    made = Windows(torch.arange(26), length=5, batch_size=2, shuffle=False, drop_last=False)
    seen = torch.cat([batch.inputs.flatten() for batch in made.epoch(0)])
    assert torch.equal(seen, torch.arange(25))


@pytest.mark.parametrize(("count", "shuffle"), [(19, True), (10, False)])
def test_a_text_that_is_too_short(count: int, shuffle: bool) -> None:
    with pytest.raises(DataError, match=f"{count} tokens are too few for windows of 10; choose"):
        Windows(torch.arange(count), length=10, batch_size=1, shuffle=shuffle)
    assert len(Windows(torch.arange(count + 1), length=10, batch_size=1, shuffle=shuffle)) == 1


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(windows) == doctest.TestResults(failed=0, attempted=3)
