"""The head is found where there is little doubt, and asked for where there is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from primum.setup.find import candidates, find_head, given_head, is_linear

Linear = nn.Linear
UNTRAINED = "no nn.Linear is trained (with PEFT: list the head in modules_to_save)"


def net(**children: nn.Module) -> nn.Module:
    """A plain module with these children, in this order."""
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def mlp(*widths: int) -> nn.Sequential:
    layers = [Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[x for layer in layers for x in (layer, nn.ReLU())][:-1])


def encoder() -> nn.Module:
    """A backbone that ends in a linear layer of its own, as BERT's pooler."""
    return net(layer=nn.TransformerEncoderLayer(8, 2, 16), pooler=Linear(8, 8))


def block() -> nn.Module:
    return net(dense=Linear(8, 8), norm=nn.LayerNorm(8), out_proj=Linear(8, 3))


class Declares(nn.Module):
    """As timm's and Transformers' models: a method says which layer it is."""

    def __init__(self, method: str, told: Callable[[Any], Any], **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        setattr(self, method, lambda: told(self))


class Headless(nn.Module):
    """As Transformers' base models."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.projector = encoder(), Linear(8, 12)

    @property
    def base_model(self) -> nn.Module:
        return self


def peft(module: nn.Module, copy: nn.Module) -> nn.Module:
    """A module that PEFT trains a copy of."""
    held = net(original_module=module, modules_to_save=nn.ModuleDict({"default": copy}))
    held.active_adapters = ["default"]
    return held


def timm(told: Callable[[Any], Any]) -> nn.Module:
    return Declares(
        "get_classifier", told, blocks=mlp(8, 8), head=Linear(8, 9), head_dist=Linear(8, 9)
    )


FOUND: dict[str, tuple[nn.Module, str]] = {
    "a linear layer": (Linear(8, 3), ""),
    "Sequential": (mlp(8, 16, 3), "2"),
    "Sequential, nested": (nn.Sequential(conv(), nn.Flatten(), mlp(8, 4, 3)), "2.2"),
    "something after the head": (nn.Sequential(Linear(8, 3), nn.Softmax(-1)), "0"),
    "plain layers": (net(fc1=Linear(8, 16), fc2=Linear(16, 16), fc3=Linear(16, 3)), "fc3"),
    "a list of layers": (net(layers=nn.ModuleList([Linear(8, 16), Linear(16, 3)])), "layers.1"),
    "ResNet": (net(conv1=nn.Conv2d(3, 8, 3), layer1=conv(), fc=Linear(8, 10)), "fc"),
    "VGG": (net(features=conv(), classifier=mlp(8, 16, 10)), "classifier.2"),
    "GoogLeNet": (net(conv=conv(), aux1=net(fc1=Linear(8, 9)), fc=Linear(8, 3)), "fc"),
    "BERT": (net(bert=encoder(), drop=nn.Dropout(), classifier=Linear(8, 3)), "classifier"),
    "RoBERTa": (net(roberta=encoder(), classifier=block()), "classifier.out_proj"),
    "ModernBERT": (net(model=encoder(), head=mlp(8, 8), classifier=Linear(8, 3)), "classifier"),
    "MobileNet": (net(body=conv(), head=nn.Sequential(nn.Conv2d(8, 9, 1)), out=mlp(9, 3)), "out.0"),
    "a name, registered first": (net(qa_outputs=Linear(8, 2), roberta=encoder()), "qa_outputs"),
    "a block at the end": (net(electra=encoder(), predictions=block()), "predictions.out_proj"),
    "an embedding at the end": (
        net(body=encoder(), decoder=Linear(8, 9), words=nn.Embedding(9, 8)),
        "decoder",
    ),
    "LightningModule": (
        net(model=net(body=conv(), fc=Linear(8, 9)), loss=nn.MSELoss()),
        "model.fc",
    ),
    "timm": (timm(lambda m: m.head), "head"),
    "timm, distilled, one": (timm(lambda m: m.head_dist), "head_dist"),
    "Transformers": (
        Declares("get_output_embeddings", lambda m: m.decoder, decoder=Linear(8, 9), x=mlp(8, 8)),
        "decoder",
    ),
    "PEFT": (
        net(body=mlp(4, 8), score=peft(Linear(8, 3), Linear(8, 3))),
        "score.modules_to_save.default",
    ),
    "torch.compile": (torch.compile(mlp(8, 16, 3), backend="eager"), "_orig_mod.2"),
    "AveragedModel": (optim.swa_utils.AveragedModel(mlp(8, 16, 3)), "module.2"),
}


@pytest.mark.parametrize("family", FOUND)
def test_found(family: str) -> None:
    model, name = FOUND[family]
    assert find_head(model) is model.get_submodule(name)


def clip() -> nn.Module:
    model = net(images=encoder(), texts=encoder(), visual=Linear(12, 8), text=Linear(8, 8))
    model.logit_scale = nn.Parameter(torch.ones(()))
    return model


DOUBTFUL: dict[str, tuple[nn.Module, str]] = {
    "CLIP": (clip(), "text (8 -> 8)"),
    "Transformers, no head": (Headless(), "projector (8 -> 12)"),
    "timm, two heads": (timm(lambda m: (m.head, m.head_dist)), "head (8 -> 9)"),
    "timm, features only": (timm(lambda m: nn.Identity()), "head (8 -> 9)"),
    "a dictionary of heads": (
        net(body=conv(), heads=nn.ModuleDict({"a": Linear(8, 3), "b": Linear(8, 2)})),
        "heads.b (8 -> 2)",
    ),
    "a list of heads": (
        net(body=conv(), tasks=nn.ModuleList([Linear(8, 3), Linear(8, 2)])),
        "tasks.1 (8 -> 2)",
    ),
    "normalised after": (nn.Sequential(Linear(8, 3), nn.BatchNorm1d(3)), "0 (8 -> 3)"),
    "an unknown module at the end": (net(body=conv(), tail=encoder()), "tail.pooler (8 -> 8)"),
    "a convolution at the end": (net(fit=mlp(4, 8), out=nn.Conv2d(8, 3, 1)), "fit.0 (4 -> 8)"),
}


@pytest.mark.parametrize("family", DOUBTFUL)
def test_doubtful(family: str) -> None:
    model, likely = DOUBTFUL[family]
    with pytest.raises(ValueError, match="cannot tell which layer is the head") as caught:
        find_head(model)
    assert f"pass head= one of: {likely}" in str(caught.value)


@pytest.mark.parametrize("model", [nn.Sequential(), conv(), nn.MultiheadAttention(8, 2)])
def test_no_linear_layer(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear"):
        find_head(model)


def test_a_layer_that_is_not_trained_is_not_taken() -> None:
    model = net(body=mlp(4, 8), out=Linear(8, 3), old=Linear(3, 3))
    model.get_submodule("old").requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen.*one of: out \(8 -> 3\), body\.0 \(4 -> 8\)"):
        find_head(model)
    model.get_submodule("old").requires_grad_(True)
    assert find_head(model) is model.get_submodule("old")
    held = [optim.SGD(model.get_submodule("out").parameters(), lr=0.1)]
    with pytest.raises(ValueError, match=r"optimizer does not hold.*one of: out \(8 -> 3\)$"):
        find_head(model, held)


def test_adapters_are_no_heads() -> None:
    """A frozen head: as it is, and with an adapter of its own."""
    pair = {"lora_A": nn.ModuleDict({"a": Linear(8, 2)}), "lora_B": nn.ModuleDict({"a": mlp(2, 3)})}
    adapted = net(base_layer=Linear(8, 3).requires_grad_(False), **pair)
    for head in (adapted, Linear(8, 3).requires_grad_(False)):
        model = net(body=net(query=adapted), lm_head=head)
        assert candidates(model) == UNTRAINED
    assert find_head(model) is head  # refused by check_head, in words
    with pytest.raises(ValueError, match="cannot tell"):
        find_head(net(body=conv(), lm_head=adapted))


def test_the_likely_candidates_come_first_and_three_at_most() -> None:
    layers = {f"layer{n}": Linear(2, 2) for n in range(4)}
    listed = candidates(net(lm_head=Linear(2, 9), **layers))
    assert listed == (
        "pass head= one of: lm_head (2 -> 9), layer3 (2 -> 2), layer2 (2 -> 2) and 2 more"
    )
    assert candidates(Linear(2, 2)) == "pass head= one of: the model itself"
    assert candidates(Linear(2, 2).requires_grad_(False)) == UNTRAINED


@pytest.mark.parametrize("name", ["out", "module.out", "_orig_mod.module.out"])
def test_a_given_head_is_taken_by_name_with_and_without_prefixes(name: str) -> None:
    inner = net(out=Linear(8, 3), old=Linear(3, 2))
    for model in (inner, net(module=inner)):
        assert given_head(model, name) is inner.get_submodule("out")
    assert given_head(inner, inner.get_submodule("out")) is inner.get_submodule("out")


def test_given_heads_that_do_not_serve() -> None:
    model = net(conv=nn.Conv2d(3, 8, 3), out=Linear(8, 3))
    with pytest.raises(TypeError, match=r"got torch\.nn\.modules\.conv\.Conv2d; pass head="):
        given_head(model, "conv")
    with pytest.raises(ValueError, match="no module named 'head'; pass head="):
        given_head(model, "head")
    with pytest.raises(TypeError, match=r"got builtins\.int"):
        given_head(model, 3)


class Plain(nn.Module):
    """As PyG's `Linear`, and some that look like it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.in_channels, self.out_channels, self.kind = 4, 4, kind

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        if self.kind == "graph":
            x = x[edges[0]]
        if self.kind == "cosine":
            x = F.normalize(x, dim=-1)
        weight = self.weight.T if self.kind == "transposed" else self.weight
        return F.linear(x, weight, self.bias)


@pytest.mark.parametrize("kind", ["linear", "graph", "cosine", "transposed"])
def test_what_behaves_as_a_linear_layer_is_one(kind: str) -> None:
    layer, state = Plain(kind), torch.random.get_rng_state()
    assert is_linear(layer) is (kind == "linear")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_called_otherwise_is_none() -> None:
    assert not is_linear(nn.MultiheadAttention(8, 2).out_proj)
    assert not is_linear(nn.Embedding(3, 3))
    assert not is_linear(None)
