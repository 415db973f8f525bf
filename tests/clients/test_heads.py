"""Models of public libraries: the right layer is weighed, or the user is asked for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn, optim

import primum
from primum.setup.find import find_head

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
LABELS = {"num_labels": 3}
WAY_OUT = r"loss = reducer\(losses\)"


def made(name: str, config: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**(TEXT | {"pad_token_id": 0} | options))
    model: nn.Module = getattr(transformers, name)(settings)
    return model


def name_of(model: nn.Module, layer: nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is layer)


FOUND: list[tuple[str, str, dict[str, Any], str]] = [
    ("BertForSequenceClassification", "BertConfig", LABELS, "classifier"),
    ("BertForMaskedLM", "BertConfig", {}, "cls.predictions.decoder"),
    ("BertForNextSentencePrediction", "BertConfig", {}, "cls.seq_relationship"),
    ("BertForQuestionAnswering", "BertConfig", {}, "qa_outputs"),
    ("RobertaForMaskedLM", "RobertaConfig", {}, "lm_head.decoder"),
    ("RobertaForTokenClassification", "RobertaConfig", LABELS, "classifier"),
    ("XLMRobertaForQuestionAnswering", "XLMRobertaConfig", {}, "qa_outputs"),
    ("ElectraForPreTraining", "ElectraConfig", {}, "discriminator_predictions.dense_prediction"),
    ("ModernBertForSequenceClassification", "ModernBertConfig", LABELS, "classifier"),
    ("ModernBertForTokenClassification", "ModernBertConfig", LABELS, "classifier"),
    ("ModernBertForMaskedLM", "ModernBertConfig", {}, "decoder"),
    ("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 8}, "predictions.decoder"),
    ("LlamaForCausalLM", "LlamaConfig", {}, "lm_head"),
    ("LlamaForSequenceClassification", "LlamaConfig", LABELS, "score"),
]


class TestTransformers:
    @pytest.mark.parametrize(("name", "config", "options", "head"), FOUND, ids=lambda x: str(x))
    def test_found_and_weighed(
        self, name: str, config: str, options: dict[str, Any], head: str
    ) -> None:
        """The gradient at the model's own output is changed, so the layer made that output."""
        model = made(name, config, **options)
        assert name_of(model, find_head(model)) == head
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        reducer = primum.attach(model, optimizer, per="sample")
        inputs = torch.randint(1, 40, (6, 7))
        output = model(input_ids=inputs)
        logits: Tensor = output["start_logits" if "Answering" in name else "logits"]
        logits.pow(2).sum().backward()
        assert reducer.last is not None
        assert reducer.last.applied, reducer.last.reason
        assert len(reducer.last.extra_weights) == 6

    def test_an_encoder_and_a_decoder(self) -> None:
        config = transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
        )
        model = transformers.T5ForConditionalGeneration(config)
        assert name_of(model, find_head(model)) == "lm_head"

    @pytest.mark.parametrize("width", [16, 24], ids=["one width", "as published"])
    def test_clip_is_refused(self, width: int) -> None:
        """Its logits compare two projections; at the published widths they look like a chain."""
        vision = {"hidden_size": width, "image_size": 8, "patch_size": 4}
        config = transformers.CLIPConfig(
            text_config=TEXT, vision_config=TEXT | vision, projection_dim=16
        )
        model = transformers.CLIPModel(config)
        assert (model.text_projection.in_features, model.visual_projection.in_features) == (
            16,
            width,
        )
        with pytest.raises(ValueError, match=r"cannot tell.*text_projection.*visual_projection"):
            find_head(model)

    @pytest.mark.parametrize("both", [False, True])
    def test_two_outputs(self, both: bool) -> None:
        """Weighed, unless the loss also uses the other one: then the first pass says so, once."""
        model = made("BertForPreTraining", "BertConfig")
        assert name_of(model, find_head(model)) == "cls.predictions.decoder"
        reducer = primum.attach(model, optim.SGD(model.parameters(), lr=1e-3), per="sample")
        for number in range(3):
            output = model(input_ids=torch.randint(1, 40, (6, 7)))
            loss = output.prediction_logits.pow(2).sum()
            loss = loss + output.seq_relationship_logits.pow(2).sum() if both else loss
            first = both and number == 0
            with pytest.warns(RuntimeWarning, match=WAY_OUT) if first else nullcontext():
                loss.backward()
        assert reducer.last is not None
        assert reducer.last.applied is not both

    @pytest.mark.parametrize("name", ["BertModel", "AlbertModel"])
    def test_a_model_without_a_head_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="cannot tell which layer is the head"):
            find_head(made(name, name.replace("Model", "Config")))

    def test_a_convolution_is_no_head(self) -> None:
        with pytest.raises(ValueError, match="cannot tell which layer is the head"):
            find_head(segformer())


def segformer() -> nn.Module:
    torch.manual_seed(0)
    stages = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]}
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        sr_ratios=[1, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        **stages,
    )
    return transformers.SegformerForSemanticSegmentation(config).train()


class CrossViT(nn.Module):
    """As timm's: one head for each branch, of different widths; their logits are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 12)])
        self.head = nn.ModuleList([nn.Linear(8, 4), nn.Linear(12, 4)])

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.head, self.branches, strict=True)
        return torch.stack([head(branch(x).tanh()) for head, branch in pairs]).mean(0)


class NormLinear(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.bn, self.linear = nn.BatchNorm1d(inputs), nn.Linear(inputs, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.bn(x))
        return y


class LeViT(nn.Module):
    """As timm's, distilled: a second head for the teacher's labels."""

    def __init__(self, *, distilled: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = NormLinear(8)
        self.head_dist = NormLinear(8) if distilled else None

    def get_classifier(self) -> Any:
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y if self.head_dist is None else (y + self.head_dist(self.body(x))) / 2


class SqueezeExcite(nn.Module):
    """A convolution makes the output; the gate that scales the features is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.gate = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).relu()
        y = y * self.gate(y.mean((2, 3)))[:, :, None, None]
        return self.out(y).mean((2, 3))


class TestTimm:
    @pytest.mark.parametrize(
        ("model", "heads"),
        [
            (CrossViT, r"head\.1 \(12 -> 4\), head\.0 \(8 -> 4\)"),
            (LeViT, r"head\.linear \(8 -> 4\), head_dist\.linear \(8 -> 4\)"),
        ],
    )
    def test_two_heads_are_refused(self, model: Callable[[], nn.Module], heads: str) -> None:
        with pytest.raises(ValueError, match=f"cannot tell which layer.*one of: {heads}"):
            find_head(model())

    def test_a_gate_stays_plain(self) -> None:
        """The layer that was found scales what the output is made of, as the first pass shows."""
        model = SqueezeExcite()
        reducer = primum.attach(model, optim.SGD(model.parameters(), lr=0.1))
        assert reducer.head is model.gate[2]
        with pytest.warns(RuntimeWarning, match=f"'gate.2' is only part of .*{WAY_OUT}"):
            model(torch.randn(6, 3, 5, 5)).pow(2).sum().backward()
        assert reducer.last is not None
        assert not reducer.last.applied

    def test_one_head_with_a_norm(self) -> None:
        model = LeViT(distilled=False)
        assert find_head(model) is model.head.linear
