"""One run: one recipe, one arm, one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from primum import StepReport
from primum.experiments import data
from primum.experiments.arms import ARMS
from primum.experiments.recipes import Recipe, build_model, build_optimizer, build_schedule


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Runs of one seed share first parameters and batch order."""

    recipe: Recipe
    arm: str
    seed: int
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Batch:
    """One batch: each sample's first-order loss change, by the plain step and with weights."""

    step: int
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """What came out. Curves have one value per epoch, harm and weights one per step."""

    settings: Settings
    train_loss: tuple[float, ...]
    test_loss: tuple[float, ...]
    test_accuracy: tuple[float, ...]
    harmed_before: tuple[float, ...]
    harmed_after: tuple[float, ...]
    extra_weight: tuple[float, ...]
    batch: Batch
    fallbacks: int

    @property
    def mean_weight(self) -> float:
        """Mean weight of a sample over the run: the factor of the lr-matched control."""
        return 1.0 + fmean(self.extra_weight)


def train(settings: Settings, rank: int = 0, ranks: int = 1) -> Run:
    """Train from the first step to the last. The last epoch's figures count, never the best's.

    With several ranks, in a process group, this is one of them: it takes its share of each batch.
    """
    recipe = settings.recipe
    digits = data.load(recipe.train_size, recipe.noise)
    model = build_model(recipe, settings.seed)
    optimizer = build_optimizer(recipe, model, recipe.lr * settings.lr_factor)
    schedule = build_schedule(recipe, optimizer)
    net: nn.Module = model if ranks == 1 else DistributedDataParallel(model)
    take_step = ARMS[settings.arm](net, optimizer, recipe.radius, settings.seed)

    curves: list[tuple[float, float, float]] = []
    figures: list[Tensor] = []  # per step: harmed before, harmed after, mean extra weight
    middle: Batch | None = None
    report: StepReport | None = None
    for order in epochs(recipe, settings.seed):
        model.train()
        losses = []
        for rows in order:
            lr = float(schedule.get_last_lr()[0])
            own = rows.chunk(ranks)[rank]
            loss, report = take_step(digits.train_images[own], digits.train_labels[own])
            if ranks > 1:
                dist.all_reduce(loss)
                loss /= ranks
            schedule.step()
            assert report is not None
            losses.append(loss)
            figures.append(_figures(report))
            if len(figures) == recipe.steps // 2:
                middle = _capture(report, len(figures), lr)
        train_loss = float(torch.stack(losses).mean())
        curves.append((train_loss, *evaluate(model, digits.test_images, digits.test_labels)))
    assert middle is not None
    assert report is not None
    train_losses, test_losses, test_accuracies = zip(*curves, strict=True)
    before, after, extra = torch.stack(figures, dim=1).tolist()
    return Run(
        settings=settings,
        train_loss=train_losses,
        test_loss=test_losses,
        test_accuracy=test_accuracies,
        harmed_before=tuple(before),
        harmed_after=tuple(after),
        extra_weight=tuple(extra),
        batch=middle,
        fallbacks=int(report.fallbacks),
    )


def epochs(recipe: Recipe, seed: int) -> Iterator[list[Tensor]]:
    """For each epoch, its batches as row numbers; the same for every arm."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(recipe.epochs):
        order = torch.randperm(recipe.train_size, generator=generator)
        whole = order[: recipe.steps_per_epoch * recipe.batch_size]
        yield list(whole.view(-1, recipe.batch_size))


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    logits = model(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return float(F.cross_entropy(logits, labels)), float(accuracy)


def _figures(report: StepReport) -> Tensor:
    return torch.stack(
        [report.harmed_before, report.harmed_after, report.extra_weights.mean()]
    ).detach()


def _capture(report: StepReport, step: int, lr: float) -> Batch:
    """Drift is the change of `loss / B` per unit lr; times both, it is in units of the loss."""
    scale = lr * len(report.drift)
    return Batch(
        step=step,
        before=tuple((scale * report.drift).tolist()),
        after=tuple((scale * report.drift_after).tolist()),
    )
