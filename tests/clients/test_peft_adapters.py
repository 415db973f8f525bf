"""PEFT: a language model whose head is frozen or adapted is refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, get_peft_model
from torch import nn, optim
from transformers import LlamaConfig, LlamaForCausalLM

import primum
from loops import report_of

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def adapted(kind: type[PeftConfig] = LoraConfig, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["v_proj"]} | options
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZE)), kind(**settings)).train()
    return model, optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("head", [None, "lm_head"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(LoraConfig, {}), (AdaLoraConfig, {"total_step": 10, "tinit": 1, "tfinal": 1})],
)
def test_a_frozen_head(kind: type[PeftConfig], options: dict[str, Any], head: str | None) -> None:
    model, optimizer = adapted(kind, **options)
    with pytest.raises(ValueError, match=r"lm_head\.weight is frozen.*list the head in modules_to"):
        primum.attach(model, optimizer, head=head)


@pytest.mark.parametrize("head", [None, "lm_head"])
def test_an_adapter_on_the_head(head: str | None) -> None:
    model, optimizer = adapted(target_modules=["v_proj", "lm_head"])
    with pytest.raises((TypeError, ValueError), match="list the head in modules_to_save"):
        primum.attach(model, optimizer, head=head)


def test_the_way_out() -> None:
    model, optimizer = adapted(modules_to_save=["lm_head"])
    reducer = primum.attach(model, optimizer)
    ids = torch.randint(1, 40, (6, 7))
    model(input_ids=ids, labels=ids).loss.backward()
    assert report_of(reducer).applied
