"""Losses: any that is a sum of one number per sample, and what happens to others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from compatibility.oracle import check_step
from loops import BOTH, SGD, assert_close, batch, gradients, make, report_of

Shares = Callable[[nn.Module, Tensor, Tensor], Tensor]


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Inputs and targets mixed with those of another sample."""
    logits = model(0.7 * x + 0.3 * x.flip(0))
    one, two = (F.cross_entropy(logits, t, reduction="none") for t in (y, y.flip(0)))
    return (0.7 * one + 0.3 * two) / len(y)


def cutmix(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A part of each input from another sample, targets by its share."""
    mixed = torch.cat([x[:, :4], x.flip(0)[:, 4:]], 1)
    targets = (4 * F.one_hot(y, 4) + 2 * F.one_hot(y.flip(0), 4)) / 6
    return F.cross_entropy(model(mixed), targets.to(x), reduction="none") / len(y)


def ranking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Within a sample: the right output above each of the others by a margin."""
    logits = model(x)
    right = logits.gather(1, y.unsqueeze(1))
    wrong = 1 - F.one_hot(y, 4)
    return ((1 - right + logits).clamp_min(0) * wrong).sum(1) / len(y)


def listwise(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Within a sample: the likelihood of the order of relevances (ListMLE)."""
    order = (torch.arange(4) + y.unsqueeze(1)) % 4
    scores = model(x).gather(1, order)
    return (scores.flip(1).logcumsumexp(1).flip(1) - scores).sum(1) / len(y)


def class_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """`F.cross_entropy(weight=...)` divides by the weights of the batch: a number like any."""
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).to(x)
    losses = F.cross_entropy(model(x), y, weight=weight, reduction="none")
    return losses / weight[y].sum()


def multi_label(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    targets = (F.one_hot(y, 4) | F.one_hot(y.flip(0), 4)).to(x)
    losses = F.binary_cross_entropy_with_logits(
        model(x), targets, pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x), reduction="none"
    )
    return losses.mean(1) / len(y)


def distillation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    teacher = (x[:, :4] / 2).log_softmax(1)
    student = (model(x) / 2).log_softmax(1)
    losses = F.kl_div(student, teacher, log_target=True, reduction="none").sum(1)
    return (4 * losses + F.cross_entropy(model(x), y, reduction="none")) / len(y)


def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(model(x), x[:, :4] * 3, reduction="none").mean(1) / len(y)


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


LOSSES: dict[str, Shares] = {
    each.__name__: each
    for each in (mixup, cutmix, ranking, listwise, class_weights, multi_label, huber, summed)
}


@BOTH
@pytest.mark.parametrize("name", LOSSES)
def test_one_number_per_sample(kind: Any, options: Any, name: str) -> None:
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    most = []
    for number in range(4):
        x, y = batch(number, 24)
        step = check_step(
            model,
            [optimizer],
            reducer,
            lambda net, x=x, y=y: LOSSES[name](net, x, y),
            head="2",
            lr=options["lr"],
            gain_one=kind is optim.SGD,
        )
        most.append(step)
    assert max(most) > 0.01


@BOTH
def test_a_teacher_and_two_passes(kind: Any, options: Any) -> None:
    """Here the model runs twice per sample: the explicit form sees both."""
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    most = []
    for number in range(4):
        x, y = batch(number, 24)
        step = check_step(
            model,
            [optimizer],
            reducer,
            lambda net, x=x, y=y: distillation(net, x, y),
            head="2",
            lr=options["lr"],
            by_call=True,
        )
        most.append(step)
    assert max(most) > 0.01


def test_a_sum_is_a_mean_at_another_rate() -> None:
    """The weights do not depend on how the loss is scaled if the rate makes up for it."""
    (one, first), (two, second) = (
        make(optim.SGD, {"lr": lr, "momentum": 0.9}) for lr in (0.24, 0.01)
    )
    reducers = primum.attach(one, first), primum.attach(two, second)
    for number in range(4):
        inputs, labels = batch(number, 24)
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(one(inputs), labels).backward()
        F.cross_entropy(two(inputs), labels, reduction="sum").backward()
        found, expected = (report_of(each).extra_weights for each in reducers)
        assert expected.max() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        first.step()
        second.step()


def contrastive(outputs: Tensor) -> Tensor:
    """InfoNCE: each sample's loss depends on the outputs of all the others."""
    z = F.normalize(outputs, dim=1)
    similar = z[::2] @ z[1::2].t() / 0.2
    return F.cross_entropy(similar, torch.arange(len(similar)))


def test_coupled_losses_are_outside_the_assumption() -> None:
    """It runs, but a row of the gradient is not one sample's: no weighted loss has this gradient.

    `observe` tells as little there, so pause: `reducer.enabled = False`.
    """
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    for number in range(4):
        inputs, _ = batch(number, 24)
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        contrastive(model(inputs)).backward()
        optimizer.step()
    report = report_of(reducer)
    assert report.applied
    assert report.extra_weights.max() > 0.01
    # The best that weights on the twelve pairs could do: least squares, with any sign.
    z = F.normalize(twin(inputs), dim=1)
    similar = z[::2] @ z[1::2].t() / 0.2
    losses = F.cross_entropy(similar, torch.arange(12), reduction="none") / 12
    rows = torch.stack(
        [
            torch.autograd.grad(each, twin[2].weight, retain_graph=True)[0].flatten()
            for each in losses
        ]
    )
    found = model[2].weight.grad.flatten().unsqueeze(1)
    best = torch.linalg.lstsq(rows.t(), found).solution
    assert (rows.t() @ best - found).norm() > 0.01 * found.norm()

    reducer.enabled = False
    twin = copy.deepcopy(model)
    for net in (model, twin):
        net.zero_grad()
        contrastive(net(inputs)).backward()
    assert_close(gradients(model), gradients(twin), 0.0)


def test_a_batch_level_term_beside_the_loss() -> None:
    """A penalty that does not pass through the head's output is left alone: exact."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    twin = copy.deepcopy(model)
    inputs, labels = batch(0, 24)

    def spread(net: nn.Sequential) -> Tensor:
        return -net[:2](inputs).var(0).sum()

    (F.cross_entropy(model(inputs), labels) + 0.1 * spread(model)).backward()
    w = report_of(reducer).extra_weights
    assert w.max() > 0.01
    losses = F.cross_entropy(twin(inputs), labels, reduction="none")
    (((1 + w) * losses).mean() + 0.1 * spread(twin)).backward()
    assert_close(gradients(model), gradients(twin), 1e-12)
    assert SGD["lr"] == optimizer.param_groups[0]["lr"]
