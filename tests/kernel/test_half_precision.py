"""Half precision: extra weights that are smaller than its digits count all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import batch, report_of
from primum import Solution, StepProblem
from primum.kernel.problem import plain

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


class Fixed(primum.Recipe):
    """Gives every sample the same small extra weight."""

    name = "fixed"

    def __init__(self, extra: Tensor) -> None:
        self.extra = extra

    def __call__(self, problem: StepProblem) -> Solution:
        return replace(plain(problem.drift), extra_weights=self.extra.to(problem.drift))


@HALVES
@pytest.mark.parametrize("shape", [(16,), (16, 3)], ids=["flat", "sequence"])
@pytest.mark.parametrize("extra", [0.003, 0.3])
def test_multiplied_in_float32_and_rounded_once(
    dtype: torch.dtype, shape: tuple[int, ...], extra: float
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 4).to(dtype)
    optimizer = optim.SGD(head.parameters(), lr=0.1)
    weights = extra * torch.linspace(0.5, 1, 16)
    reducer = primum.attach(head, optimizer, recipe=Fixed(weights), per="sample")
    inputs, _ = batch(0, *shape, dtype=dtype)
    outputs = head(inputs)
    handed_on: list[Tensor] = []
    outputs.register_hook(handed_on.append)  # after ours
    arriving = torch.randn(outputs.shape).to(dtype)
    outputs.backward(arriving)
    rows = (1 + weights).view(16, *(1,) * len(shape))
    expected = (arriving.float() * rows).to(dtype)
    assert torch.equal(handed_on[0], expected)
    assert not torch.equal(handed_on[0], arriving)  # it changes some entries even so
    assert torch.equal(report_of(reducer).extra_weights, weights)


@HALVES
def test_the_weights_of_the_report_are_those_applied(dtype: torch.dtype) -> None:
    """In real steps: the gradient handed on is that of the report's weights in float32."""
    torch.manual_seed(0)
    head = nn.Linear(6, 4).to(dtype)
    optimizer = optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(head, optimizer)
    for number in range(6):
        inputs, labels = batch(number, 24, dtype=dtype)
        optimizer.zero_grad()
        outputs = head(inputs)
        handed_on: list[Tensor] = []
        outputs.register_hook(handed_on.append)
        with reducer.paused():
            plain_loss = F.cross_entropy(outputs.float(), labels)
            (arriving,) = torch.autograd.grad(plain_loss, outputs, retain_graph=True)
        handed_on.clear()
        F.cross_entropy(outputs.float(), labels).backward()
        report = report_of(reducer)
        weights = report.extra_weights
        assert weights.dtype == torch.float32
        expected = (arriving.float() * (1 + weights).unsqueeze(1)).to(dtype)
        assert torch.equal(handed_on[0], expected)
        optimizer.step()
    assert report_of(reducer).applied


@HALVES
def test_the_explicit_form_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 4).to(dtype)
    weights = 0.003 * torch.linspace(0.5, 1, 16)
    reducer = primum.attach(head, optim.SGD(head.parameters(), lr=0.1), recipe=Fixed(weights))
    inputs, labels = batch(0, 16, dtype=dtype)
    losses = F.cross_entropy(head(inputs).float(), labels, reduction="none")
    weighted = reducer(losses)
    torch.testing.assert_close(weighted, ((1 + weights) * losses).mean())
