"""Scripts of the clients study in frameworks: Transformers' Trainer, PEFT, Lightning, Fabric."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from lab.bench._clients import Run, Script, images, paragraphs, shuffled, started, words, words_of
from lab.bench._clients_images import Mnist, test_loss

TOPICS, LENGTH, PADDING = 6, 24, 0
CALLBACK = "PrimumCallback({}).add_to(trainer)"


@cache
def passages(
    first: int = 0,
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:
    """Windows of words from long topics, labelled by topic: training set, test set, vocabulary.

    No paragraph is in both sets. `first` is the rank of the first topic by length, from 0.
    """
    texts: dict[str, list[list[str]]] = {}
    for name, paragraph in paragraphs():
        texts.setdefault(name, []).append(words_of(paragraph))
    longest = sorted(texts, key=lambda name: -sum(map(len, texts[name])))[: 2 * TOPICS]
    known = {word for name in longest for text in texts[name] for word in text}
    number = {word: place for place, word in enumerate(sorted(known), 2)}
    parts: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for label, name in enumerate(longest[first : first + TOPICS]):
        for place, text in enumerate(texts[name]):
            for start in range(0, len(text) - LENGTH // 2, LENGTH):
                ids = torch.tensor([number[word] for word in text[start : start + LENGTH]])
                ids = F.pad(ids, (0, LENGTH - len(ids)), value=PADDING)
                mask = (ids != PADDING).long()
                row = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(label)}
                parts[place % 3 == 0].append(row)
    return *parts, len(number) + 2


def fit(
    run: Run, model: nn.Module, data: Sequence[Any], test: Sequence[Any], **options: Any
) -> float:
    """Train with the Trainer and its defaults (AdamW, a linear schedule, clipping at 1)."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from primum.integrations.transformers import PrimumCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
            run.watch(kwargs["optimizer"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=run.few(options.pop("steps")), seed=run.seed, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            logging_steps=50, per_device_eval_batch_size=128, log_level="error", **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=test)
        trainer.remove_callback(_printer())
        trainer.add_callback(Watch())
        if run.settings is not None:
            run.callback = PrimumCallback(**run.settings).add_to(trainer)
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])


def _printer() -> Any:
    from transformers import PrinterCallback

    return PrinterCallback


def bert(size: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, num_labels=TOPICS,
    )  # fmt: skip
    made: nn.Module = BertForSequenceClassification(config)
    return made


def classification(run: Run) -> float:
    started(run)
    train, test, size = passages()
    return fit(
        run, bert(size), train, test, steps=240, learning_rate=1e-3, per_device_train_batch_size=32
    )


def pretrained(steps: int, rng: torch.Generator) -> nn.Module:
    """A model for other topics, trained without primum."""
    train, _, size = passages(TOPICS)
    model = bert(size)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for rows in shuffled(len(train), 32, steps, rng):
        batch = [train[row] for row in rows]
        optimizer.zero_grad()
        inputs = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
        model(**inputs).loss.backward()
        optimizer.step()
    return model


def lora(run: Run) -> float:
    """LoRA on the attention; the classifier is trained as a copy."""
    from peft import LoraConfig, get_peft_model

    model = pretrained(run.few(150), started(run))
    train, test, _ = passages()
    config = LoraConfig(
        task_type="SEQ_CLS", r=8, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    model = get_peft_model(model, config)
    return fit(
        run, model, train, test, steps=150, learning_rate=5e-3, per_device_train_batch_size=32
    )


def word_gpt(run: Run) -> float:
    """GPT-2 from a small config, on the 2,000 most frequent words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rng, text, length = started(run), words(2000), 32
    config = GPT2Config(
        vocab_size=text.size, n_positions=length, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    steps, batch = 200, 8

    def rows(windows: Tensor) -> list[dict[str, Tensor]]:
        return [{"input_ids": each[:-1], "labels": each[:-1]} for each in windows]

    train = rows(text.batch(steps * batch, length, rng))
    test = rows(text.batch(256, length, torch.Generator().manual_seed(0), test=True))
    return fit(
        run, GPT2LMHeadModel(config), train, test,
        steps=steps, learning_rate=2e-3, per_device_train_batch_size=batch,
    )  # fmt: skip


def lightning(run: Run) -> float:
    """Automatic optimization, AdamW, one cycle."""
    import logging

    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from primum.integrations.lightning import PrimumCallback

    rng, data = started(run), images(run)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    steps = run.few(150)

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Mnist(data.train.shape[1], data.train.shape[-1])

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.nll_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = optim.AdamW(self.parameters(), lr=1e-3)
            run.watch(optimizer)
            schedule = optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps + 1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    if run.settings is not None:
        run.callback = PrimumCallback(**run.settings)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[] if run.callback is None else [run.callback],
    )  # fmt: skip
    module = Digits()
    loader = DataLoader(
        TensorDataset(data.train, data.train_labels), batch_size=64, shuffle=True, generator=rng
    )
    trainer.fit(module, loader)
    return test_loss(module.net, data)


def fabric(run: Run) -> float:
    """A plain loop with Fabric's wrappers and its backward."""
    from lightning.fabric import Fabric

    rng, data = started(run), images(run)
    made = Fabric(accelerator="cpu", devices=1)
    net = Mnist(data.train.shape[1], data.train.shape[-1])
    model, optimizer = made.setup(net, optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    run.attach(model, optimizer)
    model.train()
    for rows in shuffled(len(data.train), 64, run.few(150), rng):
        optimizer.zero_grad()
        made.backward(F.nll_loss(model(data.train[rows]), data.train_labels[rows]))
        made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    return test_loss(net, data)


SCRIPTS = [
    Script("BERT, topics, AdamW", "Transformers: run_glue", classification,
           {CALLBACK.format(""): {}}),
    Script("BERT with LoRA, AdamW", "PEFT: sequence classification", lora,
           {CALLBACK.format(""): {}}),
    Script("GPT-2 on 2,000 words, AdamW", "Transformers: run_clm", word_gpt,
           {CALLBACK.format('per="sample"'): {"per": "sample"},
            CALLBACK.format('per="token", radius=0.2'): {"per": "token", "radius": 0.2},
            CALLBACK.format(""): {},
            CALLBACK.format("exact=True"): {"recipe": primum.Primum(exact=True)}}),
    Script("CNN, AdamW", "Lightning: Trainer", lightning,
           {"Trainer(callbacks=[PrimumCallback()])": {}}),
    Script("CNN, SGD, clipping", "Lightning: Fabric", fabric,
           {"primum.attach(model, optimizer)": {}}),
]  # fmt: skip
