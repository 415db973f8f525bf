"""TRL's SFTTrainer fuses head and loss: said at once, and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from integrations.plain import FIGURES
from primum.integrations.transformers import PrimumCallback

WORDS = 40
FUSED = "primum: the loss is computed from the head's weight without calling the head"


class WithLogits(SFTTrainer):
    """The loss of the model's own forward, which calls the head."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


def trainer(
    folder: Path,
    kind: type[SFTTrainer] = SFTTrainer,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> SFTTrainer:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=WORDS,
        intermediate_size=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **size,
    )
    rows = torch.randint(2, WORDS, (64, 8), generator=torch.Generator().manual_seed(1))
    arguments = SFTConfig(
        folder,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=0.05,
        logging_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **(settings or {}),
    )
    return kind(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_list([{"input_ids": row.tolist()} for row in rows]),
        processing_class=tokenizer,
        **options,
    )


def applied(run: SFTTrainer) -> list[float]:
    return [entry["primum/applied"] for entry in run.state.log_history if "loss" in entry]


class TestFused:
    def test_said_before_the_first_step(self, tmp_path: Path) -> None:
        run = trainer(tmp_path)
        callback = PrimumCallback().add_to(run)
        run.create_optimizer_and_scheduler(8)
        with pytest.warns(RuntimeWarning, match=rf"{FUSED}.*override compute_loss"):
            callback.on_train_begin(
                run.args, run.state, run.control, model=run.model, optimizer=run.optimizer
            )

    def test_said_in_the_first_forward_pass_if_the_trainer_is_unknown(self, tmp_path: Path) -> None:
        """`Trainer(callbacks=[...])` does not say who it is; what it passes to the model does."""
        callback = PrimumCallback()
        run = trainer(tmp_path, callbacks=[callback])
        steps: list[int] = []

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                steps.append(state.global_step)

        run.add_callback(Watch)
        with pytest.raises(RuntimeWarning, match=FUSED):  # warnings are errors here
            run.train()
        assert steps == [0]

    @pytest.mark.parametrize("added", [True, False], ids=["add_to", "callbacks="])
    def test_warned_and_logged(self, tmp_path: Path, added: bool) -> None:
        callback = PrimumCallback()
        run = trainer(tmp_path, callbacks=None if added else [callback])
        if added:
            callback.add_to(run)
        with pytest.warns(RuntimeWarning, match="primum: ") as said:
            run.train()
        assert [str(each.message) for each in said if FUSED in str(each.message)]
        assert len([each for each in said if "primum: " in str(each.message)]) == 1  # once in all
        assert callback.last is None
        assert applied(run) == [0.0, 0.0]


class TestKept:
    @pytest.mark.parametrize("added", [True, False], ids=["add_to", "callbacks="])
    def test_by_the_trainers_own_loss(self, tmp_path: Path, added: bool) -> None:
        callback = PrimumCallback()
        run = trainer(tmp_path, WithLogits, callbacks=None if added else [callback])
        if added:
            callback.add_to(run)
        run.train()
        assert callback.last is not None
        assert callback.last.applied
        assert callback.last.fallbacks == 0
        assert callback.last.per == "token"
        assert len(callback.last.extra_weights) == 8 * 8  # sequences of eight
        assert applied(run) == [1.0, 1.0]
        assert run.state.log_history[0].keys() >= FIGURES

    def test_the_same_training_but_for_the_weights(self, tmp_path: Path) -> None:
        """With radius 0, what TRL's own loss gives, up to the order of its sums."""
        fused, kept = trainer(tmp_path), trainer(tmp_path, WithLogits)
        PrimumCallback(radius=0).add_to(kept)
        fused.train()
        kept.train()
        pairs = zip(fused.model.parameters(), kept.model.parameters(), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    @pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
    def test_by_compute_loss_func(self, tmp_path: Path) -> None:
        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        run = trainer(tmp_path, compute_loss_func=loss)
        callback = PrimumCallback().add_to(run)
        run.train()
        assert callback.last is not None
        assert callback.last.applied
        assert applied(run) == [1.0, 1.0]
