"""PEFT: a frozen head, measured in the last adapter and weighed at the head's own place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import primum
from loops import report_of
from primum.integrations import lightning as for_lightning
from primum.integrations import transformers as for_transformers

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
HEAD = "base_model.model.lm_head"
BLOCK = "base_model.model.model.layers.1."
ROWS, LENGTH = 12, 7


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"]} | options
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # zeros at first, which would leave lora_A without a gradient
            nn.init.normal_(p, std=0.2)
    return adapted.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(number: int) -> Tensor:
    rng = torch.Generator().manual_seed(number)
    return torch.randint(1, 40, (ROWS, LENGTH), generator=rng)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in trained(model)])


def weighted(model: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """The gradient of `mean((1 + w) * losses)`, by autograd on the logits of a model of its own."""
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    model.zero_grad()
    each = each.view(ROWS, -1)
    by_token = len(weights) == ids.numel()  # the last position of each sequence has no loss
    rows = weights.view(ROWS, -1)[:, :-1] if by_token else weights.unsqueeze(1)
    ((1 + rows) * each).mean().backward()
    return gradients(model)


ADAPTERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "attention": ({}, BLOCK + "self_attn.v_proj.lora_B.default", HEAD),
    "every layer": (
        {"target_modules": "all-linear"},
        BLOCK + "mlp.down_proj.lora_B.default",
        HEAD,
    ),
    "the head as well": (
        {"target_modules": ["v_proj", "lm_head"]},
        HEAD + ".lora_B.default",
        HEAD,
    ),
    "DoRA": ({"use_dora": True}, BLOCK + "self_attn.v_proj.lora_B.default", HEAD),
    "dropout": ({"lora_dropout": 0.2}, BLOCK + "self_attn.v_proj.lora_B.default", HEAD),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_are_those_of_weighted_losses(name: str, checkpointed: bool) -> None:
    """The loss is computed inside the model; its norms and its loss are in float32."""
    options, layer, output = ADAPTERS[name]
    model = llama(**options).double()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model.config.use_cache = False
    optimizer = optim.AdamW(trained(model), lr=1e-2)
    reducer = primum.attach(model, optimizer)
    assert (reducer.head_name, reducer.output_name) == (layer, output)
    assert f"head={layer!r} (2 -> " in repr(reducer)
    assert f"weights at {output!r}" in repr(reducer)
    most = 0.0
    for number in range(4):
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        torch.manual_seed(number)
        model(input_ids=batch(number), labels=batch(number)).loss.backward()
        report = report_of(reducer)
        assert report.applied, report.reason
        torch.manual_seed(number)
        expected = weighted(twin, batch(number), report.extra_weights)
        assert (gradients(model) - expected).norm() <= 1e-5 * expected.norm()
        most = max(most, float(report.extra_weights.max()))
        optimizer.step()
    assert most > 0.01
    assert report.fallbacks == 0


@pytest.mark.parametrize("head", ["lm_head", BLOCK + "self_attn.v_proj.lora_B.default"])
def test_the_head_or_the_adapter_may_be_named(head: str) -> None:
    model = llama()
    reducer = primum.attach(model, optim.SGD(trained(model), lr=0.1), head=head)
    assert reducer.head_name == BLOCK + "self_attn.v_proj.lora_B.default"
    assert reducer.output_name == HEAD


def test_the_adapter_that_is_active_counts() -> None:
    model = llama()
    model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    model.set_adapter("second")
    reducer = primum.attach(model, optim.SGD(trained(model), lr=0.1))
    assert reducer.head_name.endswith("v_proj.lora_B.second")


@pytest.mark.parametrize("family", ["GPT-2", "T5"])
def test_other_families(family: str) -> None:
    """GPT-2 has adapters on layers that are no nn.Linear, and a tied head; T5 an encoder too."""
    torch.manual_seed(0)
    if family == "GPT-2":
        small = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        base: nn.Module = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **small))
        settings = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    else:
        wide = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        base = T5ForConditionalGeneration(
            T5Config(vocab_size=40, decoder_start_token_id=0, pad_token_id=0, **wide)
        )
        settings = LoraConfig(r=2, target_modules=["q", "v"])
    model = get_peft_model(base, settings).train()
    optimizer = optim.AdamW(trained(model), lr=1e-2)
    reducer = primum.attach(model, optimizer)
    assert reducer.output_name == HEAD
    assert ("h.1.attn" if family == "GPT-2" else "decoder.block.1") in reducer.head_name
    for number in range(3):
        optimizer.zero_grad()
        model(input_ids=batch(number), labels=batch(number)).loss.backward()
        optimizer.step()
    assert report_of(reducer).applied, report_of(reducer).reason
    assert report_of(reducer).fallbacks == 0


def test_adapters_without_linear_layers_are_refused() -> None:
    base = LlamaForCausalLM(LlamaConfig(**SIZE))
    settings = AdaLoraConfig(
        task_type="CAUSAL_LM", total_step=10, target_modules=["v_proj"], tinit=1, tfinal=1
    )
    model = get_peft_model(base, settings)
    with pytest.raises(ValueError, match=r"lm_head\.weight is frozen.*PEFT: list it in modules_to"):
        primum.attach(model, optim.SGD(trained(model), lr=0.1))


# --- with the line that each framework needs ------------------------------------------------------


def plain_loop(settings: dict[str, Any] | None) -> Tensor:
    model = llama()
    optimizer = optim.AdamW(trained(model), lr=1e-2)
    if settings is not None:
        primum.attach(model, optimizer, **settings)
    for number in range(4):
        optimizer.zero_grad()
        model(input_ids=batch(number), labels=batch(number)).loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in trained(model)])


ROWS_OF_IDS = [{"input_ids": ids, "labels": ids} for number in range(4) for ids in batch(number)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_trainer(tmp_path: Path, checkpointed: bool) -> None:
    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = llama()
    optimizer = optim.AdamW(trained(model), lr=1e-2)
    settings = TrainingArguments(
        tmp_path,
        num_train_epochs=1,
        per_device_train_batch_size=ROWS,
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointed else None,
    )
    steady = optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    run = InOrder(model, settings, train_dataset=ROWS_OF_IDS, optimizers=(optimizer, steady))
    callback = for_transformers.PrimumCallback().add_to(run)
    run.train()
    assert callback.last is not None
    assert callback.last.applied
    assert callback.last.fallbacks == 0
    found = torch.cat([p.detach().flatten() for p in trained(model)])
    torch.testing.assert_close(found, plain_loop({}), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, plain_loop(None), rtol=1e-3)


@pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
)
def test_lightning() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, rows: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**rows).loss
            return loss

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.AdamW(trained(self), lr=1e-2)

    module, callback = Module(), for_lightning.PrimumCallback()
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    ).fit(module, DataLoader(ROWS_OF_IDS, batch_size=ROWS))
    assert callback.last is not None
    assert callback.last.applied
    found = torch.cat([p.detach().flatten() for p in trained(module)])
    torch.testing.assert_close(found, plain_loop({}), rtol=1e-5, atol=1e-7)
