"""Who is attached, and what they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.arms import ARMS, Arm
from lab.epochs import Batch
from lab.errors import UserError
from lab.methods import Method, make_method
from laboratory.conftest import TINY, tiny

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


NO_REPORT = ("damped",)


def taking_steps(name: str) -> tuple[Method, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = make_method(tiny(name), model, optimizer)
    batch = Batch(torch.randn(6, 4), LABELS, torch.arange(6))
    for step in range(3):
        optimizer.zero_grad()
        method.backward(batch, step, 3, observed=method.observed(0))
        optimizer.step()
    return method, model


@pytest.mark.parametrize("name", ARMS)
def test_each_arm_takes_a_step(name: str) -> None:
    method, model = taking_steps(name)
    without = name in ("base", "lr-matched", "time-matched", "focal", *NO_REPORT)
    assert method.weighs == (not without)
    if name not in NO_REPORT:
        assert method.last is not None
        assert method.last.applied == method.weighs
        assert int(method.last.fallbacks) == 0
    plain = taking_steps("base")[1]
    same = all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert same == (name in ("base", "lr-matched", "time-matched"))


def test_an_arm_without_weights_is_observed_now_and_then() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = make_method(TINY, model, optimizer)
    assert [method.observed(place) for place in (0, 1, 10)] == [True, False, True]
    method.backward(Batch(LOGITS, LABELS, torch.arange(6)), 1, 3, observed=False)
    assert method.last is None


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_damping_removes_a_share_of_the_mean_gradient_at_the_logits(damping: float) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Batch(LOGITS, LABELS, torch.arange(6))
    method = make_method(tiny(f"damped@damping={damping}"), model, optimizer)
    method.backward(batch, 0, 3, observed=False)
    logits = model(batch.inputs).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(nn.functional.cross_entropy(logits, LABELS), logits)
    expected = gradients - damping * gradients.mean(0)
    torch.testing.assert_close(model.bias.grad, expected.sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.weight.grad, expected.T @ batch.inputs)
    with pytest.raises(UserError, match="damping must be > 0 and at most 1, got 2"):
        Arm.parse("damped@damping=2")
