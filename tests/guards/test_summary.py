"""The five lines of `reducer.summary()`: true figures, and a plain word where nothing was done."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import primum
from primum.guards.summary import RECENT


def train(steps: int, *, radius: float = 0.2, observe: bool = False) -> primum.Reducer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make = primum.observe if observe else primum.attach
    reducer = make(model, optimizer, radius=radius)
    reducer.kept = model  # type: ignore[attr-defined]
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,))).backward()
        optimizer.step()
    return reducer


def test_five_lines_with_the_means_of_the_last_reports(capsys: pytest.CaptureFixture[str]) -> None:
    reducer = train(15)
    reducer.summary()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "head='2' (16 -> 3)" in lines[0]
    assert "SGD" in lines[0]
    reports = list(reducer._recent.reports)
    assert len(reports) == RECENT
    before = torch.stack([report.harmed_before for report in reports]).mean()
    weight = torch.stack([report.mean_extra_weight for report in reports]).mean()
    assert f"{before:.1%} without weights, " in lines[1]
    assert f"mean {weight:.3f}" in lines[2]
    assert "ms per step" in lines[3]
    assert lines[4].endswith("plain gradients: 0 in 15 optimizer steps")
    assert "WARNING" not in "".join(lines)


def test_before_the_first_step() -> None:
    text = train(0).summary_text()
    assert "WARNING" in text
    assert "no weights were computed in 0 optimizer steps" in text


def test_radius_zero_and_observe_are_named() -> None:
    assert "no sample got extra weight" in train(3, radius=0).summary_text()
    assert "observed, not applied" in train(3, observe=True).summary_text()


def test_the_time_that_observing_adds() -> None:
    reducer = train(12, observe=True)
    each, share = reducer._stopwatch.per_step()
    assert each
    assert f"time added: {1e3 * each:.2f} ms per step, {share:.1%}" in reducer.summary_text()


def test_fallbacks_with_their_reasons() -> None:
    reducer = train(3)
    model = reducer.kept  # type: ignore[attr-defined]
    del reducer.optimizer.param_groups[0]["params"][-2:]
    losses = [cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,))) for _ in range(2)]
    for number, loss in enumerate(losses):
        with pytest.warns(RuntimeWarning, match="holds") if number == 0 else nullcontext():
            loss.backward()
    text = reducer.summary_text()
    assert "plain gradients: 2 in 3 optimizer steps: the optimizer no longer holds" in text
    assert "(2)" in text


def test_removed_it_says_so() -> None:
    reducer = train(3)
    reducer.remove()
    assert "removed" in reducer.summary_text()
