"""The head is found where there is no doubt, and asked for where there is."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from primum.find import candidates, find_head

Linear = nn.Linear


def net(**children: nn.Module) -> nn.Module:
    """A plain module with these children, in this order."""
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def conv_body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def mlp(*widths: int) -> nn.Sequential:
    layers = [Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[x for layer in layers for x in (layer, nn.ReLU())][:-1])


class Timm(nn.Module):
    """As timm's models: several linear layers, and a method that says which one it is."""

    def __init__(self, told: Callable[["Timm"], Any]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Linear(8, 8))
        self.head, self.head_dist = Linear(8, 10), Linear(8, 10)
        self.told = told

    def get_classifier(self) -> Any:
        return self.told(self)


class RobertaClassificationHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout, self.out_proj = Linear(8, 8), nn.Dropout(), Linear(8, 3)


class Encoder(nn.Module):
    """A backbone that ends in a linear layer of its own, as BERT's pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.pooler = Linear(8, 8)


FOUND: dict[str, tuple[nn.Module, str]] = {
    "a linear layer": (Linear(8, 3), ""),
    "Sequential": (mlp(8, 16, 3), "2"),
    "Sequential, nested": (nn.Sequential(conv_body(), nn.Flatten(), mlp(8, 4, 3)), "2.2"),
    "Sequential, something after the head": (nn.Sequential(Linear(8, 3), nn.Softmax(-1)), "0"),
    "Sequential of modules": (nn.Sequential(Encoder(), RobertaClassificationHead()), "1.out_proj"),
    "plain layers": (net(fc1=Linear(8, 16), fc2=Linear(16, 16), fc3=Linear(16, 3)), "fc3"),
    "plain layers, an autoencoder": (
        net(one=Linear(10, 50), two=Linear(50, 20), three=Linear(20, 10)),
        "three",
    ),
    "a list of layers": (
        net(layers=nn.ModuleList([Linear(8, 16), Linear(16, 16), Linear(16, 3)])),
        "layers.2",
    ),
    "encoder and decoder": (net(encoder=mlp(20, 9, 4), decoder=mlp(4, 9, 20)), "decoder.2"),
    "VAE": (
        net(
            fc1=Linear(20, 9),
            mean=Linear(9, 2),
            spread=Linear(9, 2),
            fc3=Linear(2, 9),
            fc4=Linear(9, 20),
        ),
        "fc4",
    ),
    "generator": (
        net(start=Linear(5, 128), body=conv_body(), out=Linear(8, 3)),
        "out",
    ),
    "ResNet": (
        net(conv1=nn.Conv2d(3, 8, 3), layer1=conv_body(), pool=nn.AvgPool2d(2), fc=Linear(8, 10)),
        "fc",
    ),
    "VGG": (
        net(features=conv_body(), avgpool=nn.AvgPool2d(2), classifier=mlp(8, 16, 16, 10)),
        "classifier.4",
    ),
    "EfficientNet": (
        net(features=conv_body(), classifier=nn.Sequential(nn.Dropout(), Linear(8, 10))),
        "classifier.1",
    ),
    "Swin": (net(features=conv_body(), norm=nn.LayerNorm(8), head=Linear(8, 10)), "head"),
    "ViT": (
        net(
            conv_proj=nn.Conv2d(3, 8, 4),
            encoder=Encoder(),
            heads=nn.Sequential(OrderedDict(pre=Linear(8, 9), act=nn.Tanh(), head=Linear(9, 5))),
        ),
        "heads.head",
    ),
    "GoogLeNet": (
        net(
            conv1=nn.Conv2d(3, 8, 3),
            aux1=net(conv=nn.Conv2d(8, 8, 1), fc1=Linear(8, 16), fc2=Linear(16, 10)),
            fc=Linear(8, 10),
        ),
        "fc",
    ),
    "timm": (Timm(lambda m: m.head_dist), "head_dist"),
    "timm, a module": (Timm(lambda m: nn.Sequential(m.head)), "head"),
    "BERT": (net(bert=Encoder(), dropout=nn.Dropout(), classifier=Linear(8, 3)), "classifier"),
    "RoBERTa": (
        net(roberta=Encoder(), classifier=RobertaClassificationHead()),
        "classifier.out_proj",
    ),
    "BART": (
        net(model=Encoder(), classification_head=RobertaClassificationHead()),
        "classification_head.out_proj",
    ),
    "Llama, classification": (net(model=Encoder(), score=Linear(8, 3, bias=False)), "score"),
    "GPT": (net(transformer=Encoder(), lm_head=Linear(8, 99, bias=False)), "lm_head"),
    "question answering": (net(bert=Encoder(), qa_outputs=Linear(8, 2)), "qa_outputs"),
    "a name, registered first": (net(head=Linear(8, 3), body=mlp(4, 8, 8)), "head"),
    "a wrapper": (net(module=mlp(8, 16, 3)), "module.2"),
    "LightningModule": (
        net(model=net(body=conv_body(), fc=Linear(8, 10)), loss=nn.MSELoss()),
        "model.fc",
    ),
    "a usual name without a linear layer": (
        net(body=conv_body(), head=nn.LayerNorm(8), out=Linear(8, 3)),
        "out",
    ),
    "a router": (net(body=conv_body(), router=net(gate=Linear(8, 4)), out=Linear(8, 3)), "out"),
    "something called module that is no wrapper": (
        net(module=mlp(4, 8, 8), out=Linear(8, 3)),
        "out",
    ),
}


@pytest.mark.parametrize("family", FOUND)
def test_found(family: str) -> None:
    model, name = FOUND[family]
    assert find_head(model) is model.get_submodule(name)


def actor_critic(**heads: nn.Module) -> nn.Module:
    return net(body=mlp(4, 8, 8), **heads)


DOUBTFUL: dict[str, tuple[nn.Module, list[str]]] = {
    "actor and critic": (
        actor_critic(actor=Linear(8, 4), critic=Linear(8, 1)),
        ["actor (8 -> 4)", "critic (8 -> 1)"],
    ),
    "actor and critic, one under a usual name": (
        actor_critic(head=Linear(8, 4), value=Linear(8, 1)),
        ["head (8 -> 4)", "value (8 -> 1)"],
    ),
    "actor and critic with layers": (
        actor_critic(actor=mlp(8, 8, 4), critic=mlp(8, 8, 1)),
        ["actor.2 (8 -> 4)", "critic.2 (8 -> 1)"],
    ),
    "actor and critic from the image": (
        net(
            actor=nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), Linear(8, 4)),
            critic=nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), Linear(8, 1)),
        ),
        ["actor.2", "critic.2"],
    ),
    "two usual names": (
        net(body=conv_body(), classifier=Linear(8, 3), score=Linear(9, 1)),
        ["classifier", "score"],
    ),
    "a projection head": (
        net(body=conv_body(), fc=Linear(8, 10), projector=mlp(8, 8, 5)),
        ["fc (8 -> 10)", "projector.2 (8 -> 5)"],
    ),
    "DeiT, distilled": (
        net(deit=Encoder(), cls_classifier=Linear(8, 10), distillation_classifier=Linear(8, 10)),
        ["cls_classifier", "distillation_classifier"],
    ),
    "timm, two heads": (Timm(lambda m: (m.head, m.head_dist)), ["head", "head_dist"]),
    "a dictionary of heads": (
        net(body=conv_body(), heads=nn.ModuleDict({"a": Linear(8, 3), "b": Linear(8, 3)})),
        ["heads.a", "heads.b"],
    ),
    "a dictionary of heads of different widths": (
        net(body=conv_body(), heads=nn.ModuleDict({"a": Linear(8, 3), "b": Linear(9, 3)})),
        ["heads.a", "heads.b"],
    ),
    "a list of heads": (
        net(body=conv_body(), heads=nn.ModuleList([Linear(8, 3), Linear(8, 2)])),
        ["heads.0", "heads.1"],
    ),
    "registered before a body": (
        net(out=Linear(8, 3), body=mlp(4, 8, 8)),
        ["out (8 -> 3)", "body.2 (8 -> 8)"],
    ),
    "registered before blocks": (
        net(out=Linear(8, 3), blocks=nn.ModuleList([Encoder(), Encoder()])),
        ["out (8 -> 3)"],
    ),
    "normalised after": (nn.Sequential(Linear(8, 3), nn.BatchNorm1d(3)), ["0 (8 -> 3)"]),
    "an unknown module at the end": (net(body=conv_body(), tail=Encoder()), ["tail.pooler"]),
}


@pytest.mark.parametrize("family", DOUBTFUL)
def test_doubtful(family: str) -> None:
    model, names = DOUBTFUL[family]
    with pytest.raises(
        ValueError, match="cannot tell which layer is the head; pass head="
    ) as caught:
        find_head(model)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(),
        conv_body(),
        nn.MultiheadAttention(8, 2),  # its linear layer is never called
        net(attention=nn.MultiheadAttention(8, 2)),
        net(features=conv_body(), classifier=nn.Sequential(nn.Conv2d(8, 3, 1))),  # SqueezeNet
    ],
)
def test_none(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear"):
        find_head(model)


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*[Linear(2, 2) for _ in range(15)], nn.BatchNorm1d(2))
    listed = candidates(model)
    assert "14 (2 -> 2)" in listed
    assert "2 (2 -> 2), " not in listed.split(":")[1].split(",")[0]
    assert "(and 3 before them)" in listed
    assert candidates(Linear(2, 2)) == "pass head= one of: the model itself"


def test_real_wrappers() -> None:
    model = mlp(8, 16, 3)
    compiled = torch.compile(model, backend="eager")
    assert find_head(compiled) is model[2]
    assert find_head(nn.DataParallel(model)) is model[2]
    average = optim.swa_utils.AveragedModel(model)
    assert find_head(average) is average.module[2]


def test_nothing_is_run() -> None:
    class Unwilling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    model = Unwilling()
    assert find_head(model) is model.fc
