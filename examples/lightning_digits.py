"""PyTorch Lightning with the one added callback. Run: python examples/lightning_digits.py"""

import csv
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from primum.integrations.lightning import PrimumCallback

warnings.filterwarnings("ignore", module="lightning")  # its hints on workers and on newer torch


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


pl.seed_everything(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:600], labels[:600]), batch_size=60, shuffle=True)
test = DataLoader(TensorDataset(images[600:], labels[600:]), batch_size=600)

with tempfile.TemporaryDirectory() as folder:
    logger = CSVLogger(folder)
    callback = PrimumCallback()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=5,
        callbacks=[callback],  # <- the one addition
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train, test)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))

for row in rows:
    if row["loss"]:
        before, after = float(row["primum/harmed_before"]), float(row["primum/harmed_after"])
        print(f"step {row['step']:>3}  loss {row['loss']:.5}  harmed {before:.0%} -> {after:.0%}")
print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.1%}")

# Weights were really applied, in every step.
assert callback.last is not None
assert callback.last.applied
assert callback.last.fallbacks == 0
assert any(float(row["primum/mean_extra_weight"] or 0) > 0 for row in rows)
