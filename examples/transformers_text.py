"""Hugging Face Trainer with the one added line: text classification with a tiny BERT built from a
config, on generated sentences; nothing is downloaded. Run: python examples/transformers_text.py"""

import random
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from primum.integrations.transformers import PrimumCallback

GOOD = ["good", "great", "lovely", "fine", "superb", "warm", "bright", "happy"]
BAD = ["bad", "awful", "dull", "poor", "cold", "bleak", "sad", "broken"]
OTHER = ["the", "a", "film", "story", "actor", "scene", "was", "felt", "and", "very", "music"]
VOCABULARY = {word: number for number, word in enumerate(["[PAD]", *GOOD, *BAD, *OTHER])}
LENGTH = 12


def review(rng: random.Random) -> dict[str, torch.Tensor]:
    """A sentence of random words, most of its opinions on one side."""
    label = rng.random() < 0.5
    sides = (GOOD, BAD) if label else (BAD, GOOD)
    words = rng.choices(OTHER, k=rng.randint(4, 8))
    words += rng.choices(sides[0], k=2) + rng.choices(sides[1], k=rng.randint(0, 2))
    rng.shuffle(words)
    ids = torch.tensor([VOCABULARY[word] for word in words] + [0] * (LENGTH - len(words)))
    target = torch.tensor(int(label))
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": target}


set_seed(0)
rng = random.Random(0)
reviews = [review(rng) for _ in range(960)]
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=reviews[:640], eval_dataset=reviews[640:])
    callback = PrimumCallback().add_to(trainer)  # <- the one added line
    trainer.train()
    print(f"test loss {trainer.evaluate()['eval_loss']:.3f}")

# Weights were really applied, in every step, and the figures are in the Trainer's own log.
assert callback.last is not None
assert callback.last.applied
assert callback.last.fallbacks == 0
logged = [entry for entry in trainer.state.log_history if "primum/mean_extra_weight" in entry]
assert len(logged) == 6
assert max(entry["primum/mean_extra_weight"] for entry in logged) > 0
