"""One look at a model about to take a step: everything that the pictures need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.diagnostics import Comparison, Probe, by_depth, compare, real_steps
from primum.diagnostics.gradients import sample_losses
from primum.diagnostics.real import stepped
from primum.experiments.images.batches import Batch

LOSS = nn.CrossEntropyLoss()
SHOWN = ("plain", "head", "network")  # whose changes are kept sample by sample
CHUNK = 32


@dataclass(frozen=True)
class Moment:
    """The next step on one batch, to first order and really.

    Attributes:
        step: Steps taken before.
        label: What was looked at, in words: a step or a checkpoint.
        lr: Of the step.
        loss: Mean over the batch.
        layers: Names, from the first to run to the last.
        scale: By layer, of the partial sum from it on (`Depth`).
        error: By layer, likewise.
        table: `Comparison.table()`, and for each weighting the mean real change of the loss over
            the batch (`mean_change`) and over test images (`test_change`).
        changes: First-order change of each sample's loss, by weighting.
        real_changes: Measured change, by weighting.
        by_lr: For several factors on the learning rate: the share really harmed by the plain step
            (`harmed_real`), how often first order has the sign right (`sign_right`), how strongly
            predicted and real changes are correlated (`correlation`).
    """

    step: int
    label: str
    lr: float
    loss: float
    layers: tuple[str, ...]
    scale: list[float]
    error: list[float]
    table: dict[str, list[Any]]
    changes: dict[str, list[float]]
    real_changes: dict[str, list[float]]
    by_lr: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def look(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    unseen: Batch,
    *,
    step: int,
    label: str,
    radius: float,
    lr_factors: Sequence[float],
) -> Moment:
    """Measure the step that is about to be taken on `batch`; `unseen` are test images.

    The model, the optimizer and their random numbers are left as they are.
    """
    probe = Probe(model, optimizer, LOSS, batch.images, batch.targets, chunk_size=CHUNK)
    comparison = compare(probe, radius=radius)
    depth = by_depth(comparison.interference)
    lr = float(comparison.interference.lr)
    unit = lr * probe.batch_size
    table: dict[str, list[Any]] = dict(comparison.table())
    table["mean_change"] = [float(s.change.mean()) for s in comparison.real.values()]
    other = Probe(model, optimizer, LOSS, unseen.images, unseen.targets, chunk_size=CHUNK)
    table["test_change"] = _elsewhere(comparison, probe, other)
    return Moment(
        step=step,
        label=label,
        lr=lr,
        loss=float(comparison.interference.losses.mean()),
        layers=depth.layers,
        scale=depth.scale.tolist(),
        error=depth.error.tolist(),
        table=table,
        changes={k: _short(unit * comparison.first[k].drift) for k in SHOWN},
        real_changes={k: _short(comparison.real[k].change) for k in SHOWN},
        by_lr=_by_lr(comparison, probe, optimizer, lr_factors),
    )


def _elsewhere(comparison: Comparison, probe: Probe, other: Probe) -> list[float]:
    """Mean real change of the losses of another batch, by weighting."""
    before = sample_losses(other).mean()
    return [
        float(sample_losses(other, stepped(probe, found.gradients)).mean() - before)
        for found in comparison.first.values()
    ]


def _by_lr(
    comparison: Comparison, probe: Probe, optimizer: Optimizer, factors: Sequence[float]
) -> dict[str, list[float]]:
    """The plain step at other learning rates; the drift is per unit of it, and stays."""
    plain: Mapping[str, Any] = {"plain": comparison.first["plain"]}
    found: dict[str, list[float]] = {
        name: [] for name in ("factor", "harmed_real", "sign_right", "correlation")
    }
    for factor in factors:
        with _scaled(optimizer, factor):
            real = real_steps(probe, {}, plain)["plain"]
        found["factor"].append(factor)
        for name, figure in (
            ("harmed_real", real.harmed),
            ("sign_right", real.sign_right),
            ("correlation", real.correlation),
        ):
            found[name].append(float(figure))
    return found


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Other learning rates for a while."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _short(values: Tensor) -> list[float]:
    """Five digits are more than a picture shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch]) -> tuple[float, float]:
    """Mean loss and accuracy over some batches, in evaluation mode; the mode is given back.

    Logits that are not finite are no answer, so a model that has diverged has no accuracy either.
    """
    training = model.training
    model.eval()
    count, loss, right = 0, 0.0, 0
    try:
        for batch in batches:
            logits = model(batch.images)
            loss += float(nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))
            right += int((logits.argmax(1) == batch.targets).sum())
            count += len(batch.ids)
    finally:
        model.train(training)
    return loss / count, right / count if math.isfinite(loss) else math.nan
