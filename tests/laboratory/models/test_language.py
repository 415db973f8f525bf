"""Language models by name: built from vocabulary and length, attachable per token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import primum
from lab.models import (
    GPT,
    LANGUAGE_MODELS,
    ModelError,
    build_language_model,
    language,
)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.filterwarnings("ignore:primum.*tied:RuntimeWarning")
def test_every_model_is_weighed_per_token(name: str) -> None:
    model = build_language_model(name, 13, 8, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reducer = primum.attach(model, optimizer, per="token", radius=0.1)
    tokens = torch.randint(13, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()
    assert reducer.last is not None
    assert reducer.last.applied
    assert reducer.last.extra_weights.shape == (32,)


def test_a_seed_decides_the_first_parameters_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    one, two, other = (build_language_model("gpt-nano", 7, 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.randn(3), expected)
    assert torch.equal(one.head.weight, two.head.weight)  # type: ignore[arg-type, union-attr]
    assert not torch.equal(one.head.weight, other.head.weight)  # type: ignore[arg-type, union-attr]


def test_ones_own() -> None:
    path = "lab.models.gpt:GPT"
    model = build_language_model(path, 7, 4)
    assert isinstance(model, GPT)
    assert model.head.out_features == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet20", "unknown language model 'resnet20'; choose from gpt-nano"),
        ("torch.nn:Linear", "must accept the keywords vocabulary and length"),
        ("lab.models.gpt:Nothing", "has no 'Nothing'"),
    ],
)
def test_models_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_language_model(name, 7, 4)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match="gpt2-nano needs transformers"):
        language.build_language_model("gpt2-nano", 7, 4)
