"""Warnings that point at the user's line, and counts that never wait for a device."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import primum
from loops import batch, make
from primum.kernel.warn import Count, warn


def test_a_warning_points_at_the_line_that_called_us() -> None:
    with pytest.warns(RuntimeWarning, match="primum: something") as caught:
        warn("something")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="primum: something else"):
        warn("something else", UserWarning)


def test_a_warning_in_a_backward_pass_points_at_it() -> None:
    """Not at a line of primum's or of torch's, between which the engine calls us."""
    model, optimizer = make()
    primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    loss = F.cross_entropy(torch.inf * model(inputs), labels)
    with pytest.warns(RuntimeWarning, match="values were not finite") as caught:
        loss.backward()
    lines = Path(__file__).read_text().splitlines()
    assert caught[0].filename == __file__
    assert lines[caught[0].lineno - 1].strip() == "loss.backward()"


class TestCount:
    def test_what_the_host_knows_is_no_news(self) -> None:
        count = Count(torch.device("cpu"))
        assert count.add(1)
        assert not count.add(torch.tensor(False))
        assert count.add(torch.tensor(True))
        assert count.value == 2

    def test_loaded_counts_are_known(self) -> None:
        count = Count(torch.device("cpu"))
        kept = torch.tensor(3)
        count.load(kept)
        assert not count.add(torch.tensor(False))
        assert count.value == 3
        assert count.value is not kept
        assert count.add(torch.tensor(True))

    def test_from_elsewhere_it_may_not_have_arrived(self) -> None:
        """A fake tensor has no value to read, and nobody waits for one."""
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            count = Count(torch.device("cuda"))
            assert not count.add(torch.ones((), dtype=torch.bool, device="cuda"))
            assert count.value.device.type == "cuda"

    def test_is_read_on_the_host_whatever_the_default_device(self) -> None:
        """Memory of the device cannot be pinned: with the explicit form, every step fell back."""
        with FakeTensorMode(), torch.device("cuda"):
            count = Count(torch.device("cuda"))
            count.add(torch.ones((), dtype=torch.bool))
            assert count._arrived is not None
            assert count._arrived.device.type == "cpu"
