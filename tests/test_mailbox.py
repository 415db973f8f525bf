"""A number of the device's, on the host, without waiting."""

import torch
from primum.mailbox import Mailbox
from torch._subclasses import FakeTensorMode


def test_on_the_host_it_is_read_at_once() -> None:
    box = Mailbox()
    assert box.read(torch.tensor(3)) == 3.0
    assert box.read(torch.tensor(0.5)) == 0.5
    assert box.read(torch.tensor(torch.nan)) is None


def test_from_elsewhere_it_may_not_have_arrived() -> None:
    """Meta tensors never arrive."""
    with FakeTensorMode():
        number = torch.ones((), device="cuda")
        assert Mailbox().read(number) is None
