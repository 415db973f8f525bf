"""One run, step by step; at any step it can be put aside and taken up again to the same end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from primum.diagnostics import InterferenceMeter
from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.ema import weight_average
from primum.experiments.images import Batches, ImageData
from primum.experiments.images.batches import Batch
from primum.experiments.models import ModelError, build_model
from primum.experiments.sweeps.arms import ArmError
from primum.experiments.sweeps.build import (
    autocast,
    build_optimizer,
    build_scaler,
    build_schedule,
)
from primum.experiments.sweeps.method import Method, cross_entropies, make_method
from primum.experiments.sweeps.ranks import Ranks, current
from primum.experiments.sweeps.settings import RunSettings, SettingsError
from primum.experiments.sweeps.stopwatch import Stopwatch

TEST_BATCH = 500


@dataclass(frozen=True)
class Matched:
    """What a matched control takes over from finished runs.

    Attributes:
        lr_factors: On the learning rate: one for the run, or one for each epoch.
        steps_factor: On the number of steps.
    """

    lr_factors: tuple[float, ...] = (1.0,)
    steps_factor: float = 1.0

    def lr_factor(self, epoch: int) -> float:
        """That of an epoch; the last one goes on."""
        return self.lr_factors[min(epoch, len(self.lr_factors) - 1)]


class Training:
    """A run under way. Call `step()` until `finished`.

    Args:
        settings: Of the run.
        data: `load_data(settings.data_settings(...))`.
        matched: For lr-matched and time-matched.
        data_workers: Processes that prepare batches; they change no number.
    """

    def __init__(
        self,
        settings: RunSettings,
        data: ImageData,
        matched: Matched | None = None,
        *,
        data_workers: int = 0,
    ) -> None:
        self.settings, self.data = settings, data
        self.matched = matched or Matched()
        self.ranks = current()
        self.ranks.check(settings)
        self.device = self.ranks.device(settings.device)
        self.data_workers = data_workers
        self.batches = _batches(settings, data, self.ranks, data_workers)
        per_epoch = len(self.batches)
        wanted = settings.steps or settings.epochs * per_epoch
        self.steps = max(1, round(wanted * self.matched.steps_factor))
        self.step_count = 0
        model = build_model(
            settings.model, data.classes, data.image_size, norm=settings.norm, seed=settings.seed
        )
        self.model: nn.Module = model.to(self.device)
        self.average = None if settings.ema is None else weight_average(self.model, settings.ema)
        self.optimizer = build_optimizer(settings, self.model)
        self.schedule = build_schedule(settings, self.optimizer, self.steps, per_epoch)
        self.scaler = build_scaler(settings)
        # Trains the model's own parameters, whose gradients are averaged over ranks.
        self.forward = self.model if self.ranks.size == 1 else DistributedDataParallel(self.model)
        self.method = attached(settings, self.forward, self.optimizer, self.scaler)
        self.meter = InterferenceMeter()  # of this epoch
        self.losses: list[Tensor] = []  # since the last evaluation
        self.stopwatch = Stopwatch(self.device)
        self.curves: dict[str, list[float]] = {}
        self.reports: dict[str, list[float]] = {}
        self._coming: Generator[Batch, None, None] | None = None
        self._lr = 0.0  # of the last step
        self._set_lr()

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch has just ended."""
        return self.step_count % len(self.batches) == 0

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, and the last epoch is evaluated."""
        return self.step_count >= self.steps

    def step(self) -> None:
        """Take a step; after the last of an epoch, report, and evaluate if it is time."""
        step, method = self.step_count, self.method
        watched = method.watched(step % len(self.batches))
        self._lr = float(self.optimizer.param_groups[0]["lr"])
        if watched and not method.weighs:
            self.stopwatch.stop()  # this step takes longer than the arm's own
        else:
            self.stopwatch.start()
        self._train_on(self._next_batch(), watched=watched)
        self.step_count += 1
        self._set_lr()
        self.stopwatch.count()
        if watched:
            self.meter.update(method.reducer.last, step=step)
        if self.finished or self.between_epochs:
            self.stopwatch.stop()
            self._end_epoch()

    def _train_on(self, batch: Batch, *, watched: bool) -> None:
        settings, scaler = self.settings, self.scaler
        self.model.train()
        self.optimizer.zero_grad()
        with autocast(settings):
            logits = self.forward(batch.images)
        losses = self.method.losses(logits, batch.targets, settings.label_smoothing)
        self.method.prepare(self.step_count, self.steps, losses, watched=watched)
        loss = losses.mean()
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if settings.clip is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        with warnings.catch_warnings():
            # A scaler may skip the first step, and the schedule then fears for its order.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.losses.append(loss.detach())

    def _set_lr(self) -> None:
        """The schedule's learning rates, times what a control takes over, for the coming step."""
        factor = self.matched.lr_factor(self.step_count // len(self.batches))
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr * factor

    def _next_batch(self) -> Batch:
        epoch, first = divmod(self.step_count, len(self.batches))
        if self._coming is None:
            self._coming = self.batches.epoch(epoch, first)
        return next(self._coming).to(self.device)

    def close(self) -> None:
        """End the processes that prepare batches; a further step starts others."""
        if self._coming is not None:
            self._coming.close()
            self._coming = None

    def _end_epoch(self) -> None:
        self.close()
        _append(self.reports, _means(self.meter, self.step_count))
        self.meter = InterferenceMeter()
        epoch = self.step_count // len(self.batches)
        if self.finished or epoch % self.settings.evaluate_every == 0:
            self._add_to_curves()

    def _add_to_curves(self) -> None:
        loss, accuracy = self.evaluate(self.model)
        trained = self.ranks.mean(torch.stack(self.losses).double().mean())
        row = {
            "epoch": self.step_count / len(self.batches),
            "step": self.step_count,
            "train_loss": float(trained),
            "test_loss": loss,
            "test_accuracy": accuracy,
            "lr": self._lr,
            "seconds": self.stopwatch.seconds,
        }
        if self.average is not None:
            row["ema_test_loss"], row["ema_test_accuracy"] = self.evaluate(self.average)
        _append(self.curves, row)
        self.losses = []

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Mean test loss and test accuracy; neither, if the model has diverged."""
        data = self.data
        test = Batches(
            data.test,
            data,
            batch_size=TEST_BATCH,
            shuffle=False,
            drop_last=False,
            workers=self.data_workers,
        )
        training = model.training
        model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        with closing(test.epoch(0)) as batches:
            for batch in batches:
                targets = batch.targets.to(self.device)
                with autocast(self.settings):
                    logits = model(batch.images.to(self.device))
                loss += cross_entropies(logits, targets).double().sum()
                right += (logits.argmax(1) == targets).sum()
        model.train(training)
        mean = float(loss) / len(data.test)
        # The largest of logits that are not finite is no answer.
        return mean, int(right) / len(data.test) if math.isfinite(mean) else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: loads with `weights_only=True`. All ranks have to ask."""
        state: dict[str, Any] = {
            "key": self.settings.key,
            "matched": [list(self.matched.lr_factors), self.matched.steps_factor],
            "step": self.step_count,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "reducer": self.method.reducer.state_dict(),
            "meter": self.meter.state_dict(),
            "losses": list(self.losses),
            "stopwatch": self.stopwatch.state_dict(),
            "curves": self.curves,
            "reports": self.reports,
            "random": self.ranks.all_of(torch.get_rng_state()),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self.device.type == "cuda":
            state["random_cuda"] = self.ranks.all_of(torch.cuda.get_rng_state(self.device))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a run of the same settings."""
        if not self.continues(state):
            raise ValueError("this is the state of another run")
        self.step_count = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.method.reducer.load_state_dict(state["reducer"])
        self.meter.load_state_dict(state["meter"])
        self.losses = list(state["losses"])
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.curves, self.reports = state["curves"], state["reports"]
        torch.set_rng_state(state["random"][self.ranks.rank].cpu())
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.device.type == "cuda":
            own = state["random_cuda"][self.ranks.rank].cpu()
            torch.cuda.set_rng_state(own, self.device)
        self.close()

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is one of this very run: same figures taken over, as many ranks."""
        own = [list(self.matched.lr_factors), self.matched.steps_factor]
        ranks = len(state.get("random", ()))
        same = state.get("key") == self.settings.key and state.get("matched") == own
        return same and ranks == self.ranks.size


def attached(
    settings: RunSettings,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> Method:
    """The arm at work on the model; says which model it is that cannot be used."""
    try:
        return make_method(settings.arm, model, optimizer, seed=settings.seed, scaler=scaler)
    except ArmError:
        raise
    except ValueError as error:
        way_out = (
            "; here, by a method get_classifier() of the model" if "head=" in str(error) else ""
        )
        raise ModelError(f"{settings.model}: {error}{way_out}") from error


def _batches(settings: RunSettings, data: ImageData, ranks: Ranks, workers: int) -> Batches:
    try:
        return Batches(
            data.train,
            data,
            batch_size=settings.batch_size,
            seed=settings.seed,
            augmentation=AUGMENTATIONS[settings.augment],
            workers=workers,
            rank=ranks.rank,
            ranks=ranks.size,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _append(table: dict[str, list[float]], row: Mapping[str, float]) -> None:
    for name, value in row.items():
        table.setdefault(name, []).append(value)


def _means(meter: InterferenceMeter, step: int) -> dict[str, float]:
    """An epoch's reports as one row: means over its watched steps, the last count of fallbacks."""
    table = meter.table()
    row: dict[str, float] = {"step": step}
    for name, values in table.items():
        known = [float(value) for value in values if value == value]
        if name == "fallbacks":
            row[name] = known[-1] if known else 0.0
        elif name not in ("step", "applied"):
            row[name] = fmean(known) if known else float("nan")
    return row
