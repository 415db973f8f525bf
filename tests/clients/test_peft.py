"""PEFT: the trained copy of a classifier is the head; its plain name is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn, optim
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import primum
from primum.setup.find import candidates, find_head

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
LORA = {"r": 2, "target_modules": ["query", "value"]}


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=3, **SIZE))
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **(LORA | options)))


def roberta() -> nn.Module:
    config = RobertaConfig(num_labels=3, pad_token_id=0, **SIZE)
    model = RobertaForSequenceClassification(config)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **LORA))


def llama(**options: Any) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, **options))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def copy_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(f"base_model.model.{name}.modules_to_save.default")


@pytest.mark.parametrize("head", [None, "classifier", "base_model.model.classifier"])
def test_the_trained_copy_is_weighed(head: str | None) -> None:
    model = bert()
    optimizer = optim.AdamW(trained(model), lr=1e-2)
    copy = copy_of(model, "classifier")
    before = copy.weight.detach().clone()
    reducer = primum.attach(model, optimizer, head=head)
    ids, labels = torch.randint(1, 40, (24, 7)), torch.randint(3, (24,))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    assert reducer.last is not None
    assert reducer.last.applied
    assert reducer.last.fallbacks == 0
    assert not torch.equal(copy.weight, before)


def test_found_inside_a_copied_block() -> None:
    model = roberta()
    out = copy_of(model, "classifier").out_proj
    assert find_head(model) is out
    reducer = primum.attach(model, optim.SGD(trained(model), lr=0.1), head="classifier.out_proj")
    model(input_ids=torch.randint(1, 40, (6, 7)), labels=torch.randint(3, (6,))).loss.backward()
    assert reducer.last is not None
    assert reducer.last.applied


def test_the_wrapped_layer_itself_may_be_passed() -> None:
    model = bert()
    wrapper = model.get_submodule("base_model.model.classifier")
    reducer = primum.attach(model, optim.SGD(trained(model), lr=0.1), head=wrapper)
    model(input_ids=torch.randint(1, 40, (6, 7)), labels=torch.randint(3, (6,))).loss.backward()
    assert reducer.last is not None
    assert reducer.last.applied


def test_the_active_adapter_counts() -> None:
    model = bert()
    model.add_adapter("second", LoraConfig(task_type="SEQ_CLS", **LORA))
    model.set_adapter("second")
    second = model.get_submodule("base_model.model.classifier.modules_to_save.second")
    assert find_head(model) is second


def test_prompt_tuning() -> None:
    base = BertForSequenceClassification(BertConfig(num_labels=3, **SIZE))
    settings = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    model = get_peft_model(base, settings)
    head = find_head(model)
    assert head is model.get_submodule("base_model.classifier.modules_to_save.default")


def test_only_trained_layers_are_listed() -> None:
    model = bert()
    listed = candidates(model)
    assert "base_model.model.classifier.modules_to_save.default (16 -> 3)" in listed
    assert "original_module" not in listed
    assert "base_layer" not in listed
    with pytest.raises(ValueError, match="no module named 'fc'; pass head= one of: ") as caught:
        primum.attach(model, optim.SGD(trained(model), lr=0.1), head="fc")
    assert "pooler" not in str(caught.value)


def test_a_language_head_that_peft_trains_a_copy_of() -> None:
    kept = llama(target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert find_head(kept) is copy_of(kept, "lm_head")
