"""docs/pitfalls.md quotes warnings as they are, and what it says happens does."""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import batch, make, report_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
ROOMS = ("kernel", "hooks", "setup", "tokens", "guards")
SOURCES = [each for room in ROOMS for each in (ROOT / "src" / "primum" / room).rglob("*.py")]
QUOTED = re.findall(r"^ *> `(.+)`$", PAGE, flags=re.MULTILINE)
PREFIXES = ("primum: ", "fell back to plain gradients: ", r"the output of '\w+' ")


def patterns() -> list[re.Pattern[str]]:
    """Every text of the core, with anything where a value is filled in."""
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            literal = "".join(text for text in texts if isinstance(text, str))
            if len(literal) > 30:
                joined = (re.escape(t) if isinstance(t, str) else ".+" for t in texts)
                found.append(re.compile("".join(joined)))
    return found


PATTERNS = patterns()


def known(message: str) -> bool:
    return any(pattern.fullmatch(message) for pattern in PATTERNS)


def test_quotes_are_found() -> None:
    assert len(QUOTED) >= 5
    assert not known("the head ran in eval mood; call model.train() before training")


@pytest.mark.parametrize("quoted", QUOTED)
def test_warnings_are_quoted_as_they_are(quoted: str) -> None:
    assert quoted.startswith("primum: ")
    variants, message = [quoted], quoted
    for prefix in PREFIXES:
        message = re.sub(f"^{prefix}", "", message)
        variants.append(message)
    assert any(known(each) for each in variants)


def test_every_reason_of_the_core_is_on_the_page() -> None:
    """Whatever leaves a step plain, but for a lost model and trouble of other ranks."""
    reasons = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Plain":
                reasons += [a.value for a in node.args if isinstance(a, ast.Constant)]
    elsewhere = ("the model no longer exists", "rank", "now computed from other parameters")
    reasons = [each for each in reasons if not any(words in each for words in elsewhere)]
    assert len(reasons) >= 3
    for each in reasons:
        assert each in PAGE


def test_observe_is_not_a_fallback() -> None:
    model, optimizer = make()
    watcher = primum.observe(model, optimizer)
    inputs, labels = batch(0, 24)
    F.cross_entropy(model(inputs), labels).backward()
    report = report_of(watcher)
    assert (report.applied, report.reason, int(report.fallbacks)) == (False, "observe", 0)
    assert report.harm_after < report.harm_before


@pytest.mark.parametrize("by_call", [False, True])
def test_a_sum_through_the_explicit_form(by_call: bool) -> None:
    """`reducer(B * losses)` is what a sum is under the hook."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    twin, other = make()
    expected = primum.attach(twin, other)
    inputs, labels = batch(0, 24)
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    (reducer(24 * losses) if by_call else losses.sum()).backward()
    F.cross_entropy(twin(inputs), labels, reduction="sum").backward()
    torch.testing.assert_close(report_of(reducer).drift, report_of(expected).drift)
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def test_gradients_that_are_read() -> None:
    """`torch.autograd.grad` for the parameters is reweighted like training, but not if paused."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    params = list(model.parameters())
    twin = make()[0]
    plain = torch.autograd.grad(F.cross_entropy(twin(inputs), labels), list(twin.parameters()))
    with reducer.paused():
        found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), params)
    assert reducer.last is None
    changed = torch.autograd.grad(F.cross_entropy(model(inputs), labels), params)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(changed, plain, strict=True))


class Beside(nn.Module):
    """What the last linear layer computes is not part of the output, or only a part of it."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.mean = nn.Parameter(torch.randn(8, 4))
        self.last = nn.Linear(8, 4)
        self.part, self.penalty = part, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        output, beside = hidden @ self.mean, self.last(hidden)
        self.penalty = beside.square().mean()
        return output + beside if self.part else output


@pytest.mark.parametrize(
    ("part", "said"),
    [(False, "does not reach the model's output"), (True, "is only part of the model's output")],
)
def test_a_head_beside_the_output(part: bool, said: str) -> None:
    """Both steps stay plain, and the first one says so."""
    model = Beside(part=part).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(model, optimizer)
    assert reducer.head is model.last
    inputs, labels = batch(0, 24)
    for number in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels) + model.penalty
        warning = pytest.warns(RuntimeWarning, match=f"the output of 'last' {said}")
        with nullcontext() if number else warning:
            loss.backward()
        optimizer.step()
        assert not report_of(reducer).applied
