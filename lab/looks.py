"""Whole-network measurements during training: what the next step does to each sample.

`look` measures one batch; the callback `Looks` calls it every few steps.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.callbacks import append, short
from lab.epochs import Batch
from lab.errors import UserError
from lab.images import ImageData, LazyImages
from lab.trainer import Callback, Trainer
from primum import StepReport
from primum.diagnostics import Comparison, InterferenceMeter, Probe, by_depth, compare, real_steps

SHOWN = ("plain", "head", "network")  # weightings whose changes are kept sample by sample
CHUNK = 32  # samples whose gradients are computed at a time
UNSEEN = 256  # test images on which each weighting's step is evaluated
LATER = 1 << 20  # epochs beyond any training, whose batches are only used for measurements
PROTECTED = 24  # number of samples with the most extra weight in a record


def look(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    unseen: Batch,
    *,
    radius: float,
    lr_factors: Sequence[float],
) -> dict[str, Any]:
    """Measure the step that is about to be taken on `batch`; `unseen` are test images.

    Does not change the model, the optimizer or the random state.

    Returns:
        Plain values. `lr`, `loss`; `layers`, with `scale` and `error` of the partial sums from each
        layer on (`Depth`); `table`: `Comparison.table()` with the mean measured loss change of each
        weighting over the batch (`mean_change`) and over test images (`test_change`);
        `changes` and `real_changes`: each sample's loss change by weighting, to first order and
        measured; `by_lr`: the plain step at several factors on the learning rate.
    """
    loss = nn.CrossEntropyLoss()
    probe = Probe(model, optimizer, loss, batch.inputs, batch.targets, chunk_size=CHUNK)
    comparison = compare(probe, radius=radius)
    depth = by_depth(comparison.interference)
    lr = float(comparison.interference.lr)
    unit = lr * probe.batch_size
    other = Probe(model, optimizer, loss, unseen.inputs, unseen.targets, chunk_size=CHUNK)
    table: dict[str, list[Any]] = dict(comparison.table())
    table["mean_change"] = [float(step.change.mean()) for step in comparison.real.values()]
    elsewhere = real_steps(other, {}, comparison.first)  # the same steps, on test images
    table["test_change"] = [float(step.change.mean()) for step in elsewhere.values()]
    return {
        "lr": lr,
        "loss": float(comparison.interference.losses.mean()),
        "layers": list(depth.layers),
        "scale": depth.scale.tolist(),
        "error": depth.error.tolist(),
        "table": table,
        "changes": {name: short(unit * comparison.first[name].drift) for name in SHOWN},
        "real_changes": {name: short(comparison.real[name].change) for name in SHOWN},
        "by_lr": _by_lr(comparison, probe, optimizer, lr_factors),
    }


def _by_lr(
    comparison: Comparison, probe: Probe, optimizer: Optimizer, factors: Sequence[float]
) -> dict[str, list[float]]:
    """The plain step at other learning rates; the drift, per unit of lr, does not change."""
    plain = {"plain": comparison.first["plain"]}
    found: dict[str, list[float]] = {}
    for factor in factors:
        with _scaled(optimizer, factor):
            real = real_steps(probe, {}, plain)["plain"]
        row = {
            "factor": factor,
            "harmed_real": float(real.harmed),
            "sign_right": float(real.sign_right),
            "correlation": float(real.correlation),
        }
        append(found, row)
    return found or {"factor": []}


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Looks(Callback):
    """Measures before the first step, every `settings.look.every` steps, and after the last.

    Also records the report of every step, per sample.
    """

    def __init__(self) -> None:
        self.moments: list[dict[str, Any]] = []
        self.curves: dict[str, list[Any]] = {}
        self._losses: list[Tensor] = []
        self._meter: InterferenceMeter | None = None
        self._kept: Any = None  # state of the meter, until the size of the data is known
        self._unseen: Batch | None = None

    def before_step(self, trainer: Trainer) -> None:
        look_settings = trainer.settings.look
        assert look_settings is not None
        if trainer.step_count % look_settings.every == 0:
            self.look(trainer, f"step {trainer.step_count}", first=trainer.coming)

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        self._losses.append(trainer.loss)
        self._meter_of(trainer).update(report, batch.ids, trainer.step_count - 1)

    def after_epoch(self, trainer: Trainer) -> None:
        if trainer.finished:
            self.look(trainer, f"step {trainer.step_count}", first=trainer.coming)
            trainer.close()

    def look(
        self, trainer: Trainer, label: str, *, step: int | None = None, first: Batch | None = None
    ) -> None:
        """Measure and evaluate now; `first` is the batch of the next step."""
        settings = trainer.settings.look
        assert settings is not None
        step = trainer.step_count if step is None else step
        trainer.model.train()
        if self._unseen is None:
            self._unseen = next(trainer.test_batches(UNSEEN))
        wanted = min(settings.batches, len(trainer.batches) + (first is not None))
        others = trainer.batches.epoch(LATER + step)
        for number in range(wanted):
            batch = next(others).to(trainer.device) if first is None or number else first
            try:
                found = look(
                    trainer.model,
                    trainer.optimizer,
                    batch,
                    self._unseen,
                    radius=settings.radius,
                    lr_factors=settings.lr_factors,
                )
            except ValueError as error:
                way_out = "; or choose --norm group" if "BatchNorm" in str(error) else ""
                raise UserError(f"{trainer.settings.model}: {error}{way_out}") from error
            self.moments.append({"step": step, "label": label, **found})
        others.close()
        loss, accuracy = trainer.evaluate()
        losses = self._losses[-settings.every :]
        row = {
            "epoch": step / len(trainer.batches),
            "step": step,
            "train_loss": float(torch.stack(losses).mean()) if losses else float("nan"),
            "test_loss": loss,
            "test_accuracy": accuracy,
        }
        append(self.curves, row)

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        final = {name: self.curves[name][-1] for name in ("test_loss", "test_accuracy")}
        found = {"curves": self.curves, "moments": self.moments, "final": final}
        meter = self._meter_of(trainer)
        if meter.steps:
            steps = meter.table() | {"loss": torch.stack(self._losses).tolist()}
            assert isinstance(trainer.data, ImageData)  # as the settings demand
            found |= {"steps": steps, "protected": most_protected(meter, trainer.data)}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": self.moments,
            "curves": self.curves,
            "losses": list(self._losses),
            "meter": None if self._meter is None else self._meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments, self.curves = state["moments"], state["curves"]
        self._losses, self._kept = list(state["losses"]), state["meter"]
        self._meter = None

    def _meter_of(self, trainer: Trainer) -> InterferenceMeter:
        if self._meter is None:
            self._meter = InterferenceMeter(num_samples=len(trainer.data.train))
            if self._kept is not None:
                self._meter.load_state_dict(self._kept)
        return self._meter


def most_protected(
    meter: InterferenceMeter, data: ImageData, count: int = PROTECTED
) -> list[dict[str, Any]]:
    """The samples with the most extra weight in total, in descending order, with their images."""
    samples = meter.samples()
    weights = samples["extra_weight"]
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:count]
    return [
        {
            "id": place,
            "label": data.class_names[int(data.train.labels[place])],
            "seen": samples["seen"][place],
            "harmed": samples["harmed_before"][place],
            "extra_weight": round(weights[place], 4),
            "png": png(_pixels(data, place)),
        }
        for place in ranked
        if weights[place] > 0
    ]


def png(pixels: Tensor) -> str:
    """Base64 PNG of an image: uint8 [3, H, W], or float [1, H, W]."""
    if pixels.is_floating_point():
        low, high = pixels.min(), pixels.max()
        pixels = (255 * (pixels - low) / (high - low)).to(torch.uint8).expand(3, -1, -1)
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _pixels(data: ImageData, place: int) -> Tensor:
    images = data.train.images
    return images.read(place) if isinstance(images, LazyImages) else images[place]
