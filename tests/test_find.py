"""The head is found where there is no doubt, and asked for where there is."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from primum.setup.find import candidates, find_head

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
        self.norm_head = net(bn=nn.BatchNorm1d(9), linear=Linear(9, 10))
        self.conv_head = nn.Conv2d(8, 10, 1)
        self.branches = nn.ModuleList([Linear(8, 10), Linear(12, 10)])
        self.told = told

    def get_classifier(self) -> Any:
        return self.told(self)


def attention() -> nn.Module:
    """A transformer's block in which all is linear layers and norms."""
    return net(norm=nn.LayerNorm(8), qkv=Linear(8, 24), project=Linear(8, 8), mlp=mlp(8, 16, 8))


class Declares(nn.Module):
    """As Transformers' language models: a method names the layer over the vocabulary."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def get_output_embeddings(self) -> nn.Module:
        return next(m for name, m in self.named_modules() if name.endswith("decoder"))


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
    "timm, LeViT": (Timm(lambda m: m.norm_head), "norm_head.linear"),
    "BERT, next sentence": (
        net(bert=Encoder(), cls=net(seq_relationship=Linear(8, 2))),
        "cls.seq_relationship",
    ),
    "ELECTRA, a block at the end": (
        net(
            electra=Encoder(),
            predictions=net(dense=Linear(8, 8), norm=nn.LayerNorm(8), out=Linear(8, 1)),
        ),
        "predictions.out",
    ),
    "ModernBERT": (
        net(
            model=Encoder(),
            head=net(dense=Linear(8, 8), norm=nn.LayerNorm(8)),
            classifier=Linear(8, 3),
        ),
        "classifier",
    ),
    "MobileNetV3, a convolution under a usual name": (
        net(
            body=conv_body(), head=nn.Sequential(nn.Conv2d(8, 12, 1), nn.ReLU()), out=Linear(12, 3)
        ),
        "out",
    ),
    "a text model's question answering": (
        net(qa_outputs=Linear(8, 2), roberta=Encoder()),
        "qa_outputs",
    ),
    "Transformers, masked words": (
        Declares(
            model=Encoder(),
            head=net(dense=Linear(8, 8), norm=nn.LayerNorm(8)),
            decoder=Linear(8, 99),
        ),
        "decoder",
    ),
    "Transformers, a decoder inside": (
        Declares(
            vision=conv_body(),
            projection=Linear(8, 8),
            text=net(body=Encoder(), decoder=Linear(8, 99)),
        ),
        "text.decoder",
    ),
    "an embedding registered last": (
        net(encoder=Encoder(), decoder=Linear(8, 99), words=nn.Embedding(99, 8)),
        "decoder",
    ),
    "embeddings as blocks, registered last": (
        net(body=Encoder(), out=Linear(8, 99), words=net(table=nn.Embedding(99, 8))),
        "out",
    ),
    "a transformer of linear layers": (
        net(embed=Linear(4, 8), blocks=nn.Sequential(attention(), attention()), out=Linear(8, 3)),
        "out",
    ),
    "a transformer of linear layers, under a usual name": (
        net(head=Linear(8, 3), embed=Linear(4, 8), blocks=nn.ModuleList([attention()])),
        "head",
    ),
    "a perceptron with shortcuts": (
        net(
            stem=Linear(5, 8),
            blocks=nn.ModuleList([mlp(8, 16, 8), mlp(8, 16, 8)]),
            out=Linear(8, 2),
        ),
        "out",
    ),
    "pooling by attention": (
        net(body=conv_body(), pool=net(score=Linear(8, 1)), fc=Linear(8, 10)),
        "fc",
    ),
    "two inputs": (net(user=Linear(10, 32), item=Linear(20, 32), out=Linear(64, 1)), "out"),
    "an image and numbers": (
        net(conv=nn.Conv2d(3, 8, 3), numbers=Linear(5, 16), out=Linear(8 * 25 + 16, 2)),
        "out",
    ),
    "two blocks": (
        net(
            encoder=net(a=Linear(20, 9), b=Linear(9, 4)),
            decoder=net(a=Linear(4, 9), b=Linear(9, 20)),
        ),
        "decoder.b",
    ),
    "something called module that is no wrapper": (
        net(module=mlp(4, 8, 8), out=Linear(8, 3)),
        "out",
    ),
}


@pytest.mark.parametrize("family", FOUND)
def test_found(family: str) -> None:
    model, name = FOUND[family]
    assert find_head(model) is model.get_submodule(name)


def block(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return net(
        hidden=Linear(inputs, hidden), norm=nn.LayerNorm(hidden), out=Linear(hidden, outputs)
    )


def norm_head(inputs: int) -> nn.Module:
    return net(bn=nn.BatchNorm1d(inputs), linear=Linear(inputs, 10))


def gate(width: int) -> nn.Module:
    """As in a squeeze-excite block."""
    return nn.Sequential(Linear(width, 2), nn.ReLU(), Linear(2, width), nn.Sigmoid())


def clip(**projections: nn.Module) -> nn.Module:
    model = net(images=Encoder(), texts=Encoder(), **projections)
    model.logit_scale = nn.Parameter(torch.ones(()))
    return model


class Headless(nn.Module):
    """As Transformers' base models, which end in whatever was registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.projector = Encoder(), Linear(8, 12)

    @property
    def base_model(self) -> nn.Module:
        return self


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
    "timm, two heads of different widths": (
        Timm(lambda m: (m.head, m.norm_head)),
        ["head and norm_head.linear may each produce an output"],
    ),
    "timm, CrossViT": (
        Timm(lambda m: m.branches),
        ["branches.0 and branches.1 may each produce an output"],
    ),
    "timm, features only": (Timm(lambda m: nn.Identity()), ["head (8 -> 10)"]),
    "two heads that norm their input": (
        net(body=conv_body(), head=norm_head(8), head_dist=norm_head(12)),
        ["head.linear and head_dist.linear may each produce an output"],
    ),
    "a list of heads of different widths": (
        net(body=conv_body(), heads=nn.ModuleList([Linear(8, 3), Linear(12, 3)])),
        ["heads.0 and heads.1 may each produce an output"],
    ),
    "CLIP": (
        clip(visual=Linear(12, 8), text=Linear(8, 8)),
        ["visual (12 -> 8)", "text (8 -> 8)"],
    ),
    "CLIP without a scale": (
        net(images=Encoder(), texts=Encoder(), visual=Linear(12, 8), text=Linear(8, 8)),
        ["text and visual may each produce an output"],
    ),
    "two towers": (
        net(images=Encoder(), texts=Encoder(), visual=Linear(12, 8), text=Linear(9, 8)),
        ["text and visual may each produce an output"],
    ),
    "two towers with blocks": (
        net(images=Encoder(), texts=Encoder(), visual=block(12, 8, 4), text=block(9, 8, 4)),
        ["text.out and visual.out may each produce an output"],
    ),
    "actor and critic as blocks": (
        actor_critic(actor=block(8, 8, 4), critic=block(8, 8, 1)),
        ["critic.out and actor.out may each produce an output"],
    ),
    "BERT, pre-training": (
        Declares(
            bert=Encoder(), cls=net(predictions=net(decoder=Linear(8, 99)), next=Linear(8, 2))
        ),
        ["cls.predictions.decoder and cls.next may each produce an output"],
    ),
    "GPT-2, two heads": (
        Declares(transformer=Encoder(), decoder=Linear(8, 99), choice=net(summary=Linear(8, 1))),
        ["decoder and choice.summary may each produce an output"],
    ),
    "a language model with a value head": (
        net(lm=Declares(body=Encoder(), decoder=Linear(8, 99)), value=net(out=Linear(8, 1))),
        ["value.out and lm.decoder may each produce an output"],
    ),
    "a pooler at the end": (
        net(body=conv_body(), pooler=net(dense=Linear(8, 8))),
        ["pooler.dense"],
    ),
    "Transformers, no head": (Headless(), ["projector (8 -> 12)"]),
    "an embedding that may make the output": (
        net(words=nn.Embedding(99, 8), body=Encoder(), projection=Linear(12, 8)),
        ["projection and words may each produce an output"],
    ),
    "a router": (
        net(body=conv_body(), router=net(gate=Linear(8, 4)), out=Linear(8, 3)),
        ["out and router.gate may each produce an output"],
    ),
    "a gate registered after a convolution": (
        net(body=conv_body(), out=nn.Conv2d(8, 10, 1), gate=gate(8)),
        ["gate.2 and out (a convolution) may each produce an output"],
    ),
    "a gate under a usual name": (
        net(body=conv_body(), fc=gate(8), out=nn.Conv2d(8, 10, 1)),
        ["fc.2 and out (a convolution) may each produce an output"],
    ),
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
        ValueError, match=r"cannot tell which layer is the head; (.* output; )?pass head="
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
    ],
)
def test_none(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear"):
        find_head(model)


CONVOLUTIONS: dict[str, tuple[nn.Module, str]] = {
    "SqueezeNet": (
        net(features=conv_body(), classifier=nn.Sequential(nn.Conv2d(8, 3, 1), nn.ReLU())),
        "classifier.0",
    ),
    "U-Net": (net(down=conv_body(), up=Encoder(), out=net(conv=nn.Conv2d(8, 2, 1))), "out.conv"),
    "SegFormer": (
        net(segformer=Encoder(), decode=net(mix=Linear(8, 8), classifier=nn.Conv2d(8, 3, 1))),
        "decode.classifier",
    ),
    "timm": (Timm(lambda m: m.conv_head), "conv_head"),
}


@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_convolutions(family: str) -> None:
    model, name = CONVOLUTIONS[family]
    with pytest.raises(ValueError) as caught:
        find_head(model)
    assert f"come from {name} (a convolution), and primum can only reweight at" in str(caught.value)


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*[Linear(2, 2) for _ in range(15)], nn.BatchNorm1d(2))
    listed = candidates(model)
    assert "14 (2 -> 2)" in listed
    assert "2 (2 -> 2), " not in listed.split(":")[1].split(",")[0]
    assert "(and 3 earlier ones)" in listed
    assert candidates(Linear(2, 2)) == "pass head= one of: the model itself"


def test_frozen_layers_are_not_listed() -> None:
    model = nn.Sequential(Linear(2, 4), Linear(4, 3), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    assert candidates(model) == "pass head= one of: 1 (4 -> 3)"
    model.requires_grad_(False)
    assert candidates(model) == "every nn.Linear of the model is frozen (requires_grad=False)"


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
