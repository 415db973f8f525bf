"""What several parts do together: per="auto", the sketch, and warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum


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


def test_one_fallback_is_counted_and_warned_about_once() -> None:
    """Here and in later steps, whose weights are computed again."""
    model, optimizer, reducer = started()
    for step in range(3):
        words = torch.randint(50, (4, 9))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (loss * torch.nan if step == 0 else loss).backward()
        assert [str(each.message)[:38] for each in caught] == [
            "primum: fell back to plain gradients: "
        ] * (step == 0)
        if step:
            optimizer.step()
    assert report_of(reducer).fallbacks == 1
    assert report_of(reducer).applied


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
