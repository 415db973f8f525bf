"""Which layer is weighed, and how it is going: what a user can see at a glance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, batch, make, train
from primum import Reducer


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.backbone(x))
        return output


@pytest.mark.parametrize("attach", [primum.attach, primum.observe])
def test_head_and_its_name(attach: Callable[..., Reducer]) -> None:
    model, optimizer = make()
    reducer = attach(model, optimizer)
    assert reducer.head is model[-1]
    assert reducer.head_name == "2"


def test_a_dotted_name() -> None:
    model = Classifier().double()
    reducer = primum.attach(model, optim.SGD(model.parameters(), **SGD))
    assert reducer.head is model.classifier[1]
    assert reducer.head_name == "classifier.1"
    assert model.get_submodule(reducer.head_name) is reducer.head


def test_a_model_that_is_its_own_head() -> None:
    model = nn.Linear(6, 4)
    reducer = primum.attach(model, optim.SGD(model.parameters(), **SGD))
    assert reducer.head is model
    assert isinstance(reducer.head_name, str)
    assert repr(reducer)


def test_repr_says_what_runs() -> None:
    """Name and shape of the layer, optimizer, recipe."""
    model = Classifier().double()
    text = repr(primum.attach(model, optim.AdamW(model.parameters(), **ADAMW)))
    for part in ("classifier.1", "8", "4", "AdamW", "primum"):
        assert part in text, text
    assert "paper" in repr(primum.attach(*make(), recipe="paper"))


def test_repr_counts_steps_and_fallbacks() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    assert "fallbacks" in repr(reducer)
    assert "steps" in repr(reducer)
    train(model, optimizer, 13)
    assert "13" in repr(reducer), repr(reducer)
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:2]
    with pytest.warns(RuntimeWarning, match="no longer holds the head's weight"):
        train(model, optimizer, 17)
    assert "17" in repr(reducer), repr(reducer)
    assert "30" in repr(reducer), repr(reducer)


def test_repr_after_it_is_over() -> None:
    """Removed, replaced, or the model gone: still a text, and no error."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 1)
    reducer.remove()
    assert repr(reducer)
    reducer = primum.attach(model, optimizer)
    model(batch(0, 2)[0])
    del model, optimizer
    assert repr(reducer)


class Layer(nn.Module):
    """Queries, keys and values from one linear layer, as wide at its input as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.project = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v))
        output: Tensor = x + self.mlp(self.norm(x))
        return output


class Gpt(nn.Module):
    """A language model in a few lines, whose blocks are a Sequential."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Layer(), Layer())
        self.ln = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, text: Tensor) -> Tensor:
        output: Tensor = self.lm_head(self.ln(self.blocks(self.wte(text))))
        return output


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_small_language_model(tied: bool) -> None:
    """Layers inside its blocks take the same width, and make no output."""
    model = Gpt(tied)
    reducer = primum.attach(model, optim.AdamW(model.parameters(), **ADAMW))
    assert reducer.head is model.lm_head
    assert reducer.head_name == "lm_head"
