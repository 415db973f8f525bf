"""Heads on sequences and maps: what a sample is, what is ignored, what is padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from compatibility.oracle import check_step
from loops import BOTH, SGD, batch, make, report_of


def shares_on(number: int, *shape: int, ignored: float = 0.3) -> Callable[[nn.Module], Tensor]:
    """Each sample's share of the mean over the positions that count. -> [B]."""
    inputs, labels = batch(number, *shape)
    rng = torch.Generator().manual_seed(number)
    labels[torch.rand(shape, generator=rng) < ignored] = -100
    labels[1] = -100  # a sample that is nothing but padding

    def shares_of(model: nn.Module) -> Tensor:
        logits = model(inputs).movedim(-1, 1)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        return losses.flatten(1).sum(1) / (labels != -100).sum()

    return shares_of


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 5), (6, 3, 4), (5, 2, 2, 3)])
def test_ignored_positions(kind: Any, options: Any, bias: bool, shape: tuple[int, ...]) -> None:
    """Token classification, segmentation, volumes: `ignore_index` and padding count for nothing."""
    model, optimizer = make(kind, options, bias=bias)
    reducer = primum.attach(model, optimizer, per="sample")
    most = 0.0
    for number in range(4):
        shares_of = shares_on(number, *shape)
        step = check_step(
            model,
            [optimizer],
            reducer,
            shares_of,
            head="2",
            lr=options["lr"],
            gain_one=kind is optim.SGD,
        )
        most = max(most, step)
        assert report_of(reducer).drift[1] == 0
    assert most > 0.01


def test_the_mean_that_torch_takes_is_the_same() -> None:
    """`F.cross_entropy` divides by the number of positions that count, and so do the shares."""
    (one, first), (two, second) = make(), make()
    reducers = [primum.attach(*each, per="sample") for each in ((one, first), (two, second))]
    inputs, labels = batch(0, 8, 5)
    labels[:, 3:] = -100
    F.cross_entropy(one(inputs).transpose(1, 2), labels).backward()
    losses = F.cross_entropy(two(inputs).transpose(1, 2), labels, reduction="none").sum(1)
    (losses.sum() / (labels != -100).sum()).backward()
    found, expected = (report_of(each).extra_weights for each in reducers)
    assert expected.max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Flattening(nn.Module):
    """Makes rows of all positions before the head, as some language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().flatten(0, -2))


def test_flattened_before_the_head_every_position_is_a_sample() -> None:
    """The head cannot see which rows belong together: as with `per="token"`."""
    inputs, labels = batch(0, 6, 5)
    weights = []
    for flatten in (True, False):
        model = Flattening().double()
        if not flatten:
            model.forward = lambda x, net=model: net.head(net.body(x).tanh())
        optimizer = optim.SGD(model.parameters(), **SGD)
        per = "sample" if flatten else "token"
        reducer = primum.attach(model, optimizer, per=per, radius=0.2)
        F.cross_entropy(model(inputs).view(-1, 4), labels.flatten()).backward()
        weights.append(report_of(reducer).extra_weights)
    assert weights[0].shape == (30,)
    assert weights[0].max() > 0.01
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-9, atol=1e-12)


def test_time_first_takes_positions_for_samples() -> None:
    """[T, B, d] at the head: turned before the head, samples are samples."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer, per="sample")
    inputs, labels = batch(0, 6, 5)  # five positions first would be [5, 6, d]
    turned = inputs.transpose(0, 1)
    F.cross_entropy(model(turned).flatten(0, 1), labels.t().flatten()).backward()
    assert report_of(reducer).extra_weights.shape == (5,)
    optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(turned.transpose(0, 1)).flatten(0, 1), labels.flatten()).backward()
    assert report_of(reducer).extra_weights.shape == (6,)
