"""The Trainer's option `use_liger_kernel=True`: said when training begins, and what to set.

Liger needs triton, a gigabyte, and a GPU to run. Where the package is not installed, a stand-in
replaces the model's forward as `apply_liger_kernel_to_llama` does: by a function of the package
that computes the loss from the head's weight if labels are passed, and calls the head if not.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from primum.integrations.transformers import PrimumCallback

WORDS = 40
REAL = find_spec("liger_kernel") is not None

CODE = """
def lce_forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
    if labels is None:
        return self.unpatched(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
    hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
    logits = linear(hidden, self.lm_head.weight)  # fused with the loss in the real one
    return {"loss": cross_entropy(logits, labels[:, 1:].flatten())}


def _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=True, **others):
    if fused_linear_cross_entropy:
        model.unpatched = model.forward
        model.forward = lce_forward.__get__(model)
"""


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
        vars(inner).update(linear=F.linear, cross_entropy=F.cross_entropy)
        exec(CODE, vars(inner))
        monkeypatch.setitem(sys.modules, "liger_kernel", package)
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
        monkeypatch.setattr(
            "transformers.integrations.liger.is_liger_kernel_available", lambda *args: True
        )


def trainer(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    rows = torch.randint(WORDS, (32, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        logging_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        use_liger_kernel=True,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)


@pytest.mark.usefixtures("liger")
class TestOption:
    @pytest.mark.parametrize("added", [True, False], ids=["add_to", "callbacks="])
    def test_said_before_the_first_step(self, tmp_path: Path, added: bool) -> None:
        run, callback = trainer(tmp_path), PrimumCallback()
        if added:
            callback.add_to(run)
        else:
            run.add_callback(callback)
        said = r"use_liger_kernel=True.*\"fused_linear_cross_entropy\": False"
        with pytest.raises(RuntimeWarning, match=said):  # warnings are errors here
            run.train()
        assert run.state.global_step == 0

    @pytest.mark.skipif(REAL, reason="Liger's kernels need a GPU")
    def test_the_setting_that_keeps_the_head(self, tmp_path: Path) -> None:
        run = trainer(tmp_path, liger_kernel_config={"fused_linear_cross_entropy": False})
        callback = PrimumCallback(per="token").add_to(run)
        run.train()
        assert callback.last is not None
        assert callback.last.applied
