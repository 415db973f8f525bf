"""The callbacks weigh tokens in a language model without being asked, and keep that on resuming."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, Trainer
from transformers import TrainingArguments as Arguments

from primum.integrations.lightning import PrimumCallback as LightningCallback
from primum.integrations.transformers import PrimumCallback as TrainerCallback

ROWS, LENGTH, WORDS = 4, 6, 20

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
)


class Sentences(Dataset[dict[str, Tensor]]):
    def __init__(self, *, classes: int = 0, masked: bool = False) -> None:
        rng = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, WORDS, (4 * ROWS, LENGTH), generator=rng)
        self.labels = self.tokens.clone()
        if masked:
            self.labels[:, :3] = -100
        if classes:
            self.labels = torch.randint(classes, (4 * ROWS,), generator=rng)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


def config(**options: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip


def trained(
    folder: Path, model: nn.Module, rows: Sentences, callback: TrainerCallback, **options: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }
    run = Trainer(model, Arguments(str(folder), **(defaults | options)), train_dataset=rows)
    callback.add_to(run)
    return run


class TestTrainer:
    @pytest.mark.parametrize("masked", [False, True])
    def test_a_language_model(
        self, tmp_path: Path, masked: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Head and embedding are tied, the loss is shifted, a prompt may be ignored."""
        torch.manual_seed(0)
        callback = TrainerCallback()
        model = GPT2LMHeadModel(config())
        run = trained(tmp_path, model, Sentences(masked=masked), callback)
        run.train()
        assert callback.last is not None
        assert callback.last.per == "token"
        assert len(callback.last.extra_weights) == ROWS * LENGTH
        lines = [each.getMessage() for each in caplog.records if each.name == "primum"]
        assert len(lines) == 1
        assert "reweighting tokens ([4, 6] positions at head 'lm_head'" in lines[0]
        assert "radius 0.1" in lines[0]

    def test_classification_of_sequences(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The head runs on all positions; the last word's is picked."""
        caplog.set_level(logging.INFO, "primum")
        torch.manual_seed(0)
        callback = TrainerCallback()
        model = GPT2ForSequenceClassification(config(num_labels=3))
        trained(tmp_path, model, Sentences(classes=3), callback).train()
        assert callback.last is not None
        assert callback.last.per == "sample"
        assert len(callback.last.extra_weights) == ROWS
        lines = [each.getMessage() for each in caplog.records if each.name == "primum"]
        assert len(lines) == 2
        assert "reweighting samples, radius 0.4" in lines[1]

    def test_resumed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config())
        saved = {"save_strategy": "steps", "save_steps": 2}
        trained(tmp_path, model, Sentences(), TrainerCallback(), max_steps=2, **saved).train()
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert state["stateful_callbacks"]["PrimumCallback"]["reducer"]["per"] == "token"
        caplog.clear()
        callback = TrainerCallback()
        run = trained(tmp_path, model, Sentences(), callback, max_steps=4, **saved)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert callback.last is not None
        assert callback.last.per == "token"
        assert not [each for each in caplog.records if each.name == "primum"]

    def test_asked_for(self, tmp_path: Path) -> None:
        callback = TrainerCallback(per="sample")
        trained(tmp_path, GPT2LMHeadModel(config()), Sentences(), callback).train()
        assert callback.last is not None
        assert callback.last.per == "sample"


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lm_head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.embedding(tokens))
        return logits

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        tokens = batch["input_ids"]
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 4,  # one epoch
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class TestLightning:
    def test_a_language_model(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        callback = LightningCallback()
        trainer = pl.Trainer(callbacks=[callback], **QUIET)
        loader = DataLoader(Sentences(), batch_size=ROWS)
        trainer.fit(Language(), loader)
        assert callback.last is not None
        assert callback.last.per == "token"
        assert callback.state_dict()["per"] == "token"
        lines = [each.getMessage() for each in caplog.records if each.name == "primum"]
        assert len(lines) == 1
        caplog.clear()
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        resumed = LightningCallback()
        longer = pl.Trainer(callbacks=[resumed], **(QUIET | {"max_steps": 8}))
        longer.fit(Language(), loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
        assert resumed.last is not None
        assert resumed.last.per == "token"
        assert not [each for each in caplog.records if each.name == "primum"]
