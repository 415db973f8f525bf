"""What several parts do together: per="auto", the sketch, and warnings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from primum.guards.effect import STEPS


class Language(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def hidden(self, words: Tensor) -> Tensor:
        found: Tensor = self.body(self.embedding(words)).tanh()
        return found

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(words))
        return found


def started(words: int = 50, width: int = 16, **settings: Any) -> tuple[Any, Any, primum.Reducer]:
    torch.manual_seed(0)
    model = Language(words, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, primum.attach(model, optimizer, **settings)


def report_of(reducer: primum.Reducer) -> primum.StepReport:
    assert reducer.last is not None
    return reducer.last


def test_the_pass_that_decides_for_tokens_is_sketched() -> None:
    model, _, reducer = started(4000, 64)
    words = torch.randint(4000, (8, 33))
    F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
    assert report_of(reducer).per == "token"
    assert report_of(reducer).approximate


@pytest.mark.parametrize("settings", [{}, {"radius": 0.0}])
def test_one_fallback_is_not_a_hundred(settings: dict[str, Any]) -> None:
    model, optimizer, reducer = started(**settings)
    for step in range(STEPS + 2):
        model.train(step > 0)
        words = torch.randint(50, (4, 9))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if step == 0 else "error")
            warnings.filterwarnings("ignore", message=r"primum: computing sample weights takes")
            loss.backward()
            optimizer.step()
    assert report_of(reducer).fallbacks == 1


class Twins(nn.Module):
    """A trained layer beside a frozen copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(x), self.target(x)


def test_a_frozen_copy_beside_the_head() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Twins())
    trained = [p for p in model.parameters() if p.requires_grad]
    reducer = primum.attach(model, torch.optim.SGD(trained, lr=0.1), head="2.online")
    assert reducer.head_name == "2.online"
    F.cross_entropy(model(torch.randn(12, 4))[0], torch.randint(3, (12,))).backward()
    assert report_of(reducer).applied


def test_radius_of_the_papers_recipe() -> None:
    _, _, reducer = started(recipe="paper", radius=0.0)
    assert "radius=0" in repr(reducer)
