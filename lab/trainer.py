"""The training loop; all measurements are callbacks.

Its state can be saved and loaded at any step; a resumed run ends with the same numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lab.epochs import Batch
from lab.errors import UserError
from lab.losses import cross_entropies
from lab.methods import autocast, make_method
from lab.optimizers import make_optimizer, weight_average
from lab.schedules import make_schedule
from lab.settings import Matched, RunSettings
from lab.stopwatch import Stopwatch
from lab.tasks import Data, evaluation_batches, initial_model, train_batches
from lab.torchrun import current
from primum import StepReport

FORMAT = 2  # version of the checkpoint format


class Callback:
    """Base class of callbacks; its methods do nothing.

    `fields` returns entries for the run record; dicts of several callbacks are merged.
    """

    def before_step(self, trainer: Trainer) -> None:
        """Called before each step; `trainer.coming` is its batch."""

    def after_step(self, trainer: Trainer, batch: Batch, report: StepReport | None) -> None:
        """Called after each step; `report` is None for steps that are not observed."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after each epoch, or every `evaluate_steps` steps, and at the end of the run."""

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Trainer:
    """Trains a run: call `step()` until `finished`.

    Args:
        settings: Settings of the run.
        data: `tasks.load(settings, ...)`.
        callbacks: Called in this order.
        matched: Factors for lr-matched and time-matched.
        data_workers: Processes that prepare batches; they do not change results.
    """

    def __init__(
        self,
        settings: RunSettings,
        data: Data,
        callbacks: Sequence[Callback] = (),
        *,
        matched: Matched | None = None,
        data_workers: int = 0,
    ) -> None:
        self.settings, self.data, self.callbacks = settings, data, list(callbacks)
        self.matched = matched or Matched()
        self.ranks = current()
        self.ranks.check(settings)
        self.device = self.ranks.device(settings.device)
        self.data_workers = data_workers
        self.batches = train_batches(settings, data, self.ranks, data_workers)
        wanted = settings.steps or settings.epochs * len(self.batches)
        self.steps = max(1, round(wanted * self.matched.steps_factor))
        self.step_count = 0
        self.model: nn.Module = initial_model(settings, data).to(self.device)
        # Before the arm is attached, or the copy would include its hooks.
        self.average = None if settings.ema is None else weight_average(self.model, settings.ema)
        self.optimizer = make_optimizer(settings, self.model)
        warmup = settings.warmup_steps
        warmup = round(settings.warmup * len(self.batches)) if warmup is None else warmup
        if warmup >= self.steps:
            raise UserError(
                f"warmup takes {warmup} steps, but the run has {self.steps}; choose a shorter "
                "warmup"
            )
        self.schedule = make_schedule(
            settings.schedule,
            self.optimizer,
            steps=self.steps,
            warmup=warmup,
            floor=settings.lr_floor,
        )
        fp16 = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type) if fp16 else None
        forward = self.model if self.ranks.size == 1 else DistributedDataParallel(self.model)
        self.method = make_method(settings, forward, self.optimizer, self.scaler)
        self.stopwatch = Stopwatch(self.device)
        self.lr, self.loss = 0.0, torch.zeros(())  # of the last step
        self._epoch: Generator[Batch, None, None] | None = None
        self._coming: Batch | None = None
        self._set_lr()

    @property
    def period(self) -> int:
        """Steps between calls of `after_epoch`: an epoch, or `evaluate_steps`."""
        return self.settings.evaluate_steps or len(self.batches)

    @property
    def between_epochs(self) -> bool:
        """Whether a period has just ended."""
        return self.step_count % self.period == 0

    @property
    def finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.step_count >= self.steps

    @property
    def coming(self) -> Batch:
        """The batch of the next step, on the run's device."""
        if self._coming is None:
            epoch, first = divmod(self.step_count, len(self.batches))
            if self._epoch is None:
                self._epoch = self.batches.epoch(epoch, first)
            self._coming = next(self._epoch).to(self.device)
        return self._coming

    def step(self) -> None:
        """Take one step and call the callbacks."""
        observed = self.method.observed(self.step_count % self.period)
        for callback in self.callbacks:
            callback.before_step(self)
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        if observed and not self.method.weighs:
            self.stopwatch.stop()  # observing takes extra time
        else:
            self.stopwatch.start()
        batch = self.coming
        self.loss = self._train_on(batch, observed=observed)
        self._coming = None
        self.step_count += 1
        self._set_lr()
        self.stopwatch.count()
        report = self.method.last if observed else None
        ended = self.finished or self.between_epochs
        if ended:
            self.stopwatch.stop()
        if ended or self.step_count % len(self.batches) == 0:
            self.close()
        for callback in self.callbacks:
            callback.after_step(self, batch, report)
        for callback in self.callbacks if ended else ():
            callback.after_epoch(self)

    def _train_on(self, batch: Batch, *, observed: bool) -> Tensor:
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.method.backward(batch, self.step_count, self.steps, observed=observed)
        clip, scaler = self.settings.clip, self.scaler
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        with warnings.catch_warnings():
            # If the scaler skips the first step, the scheduler warns about the order of calls.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return loss

    def _set_lr(self) -> None:
        """Set the scheduled learning rates, times the factor of a matched control."""
        factor = self.matched.lr_factor(self.step_count // self.period)
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr * factor

    def close(self) -> None:
        """Stop the processes that prepare batches; another step starts new ones."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = self._coming = None

    def test_batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches of test images or held-out text, in order, on the run's device."""
        test = evaluation_batches(self.settings, self.data, self.data_workers, batch_size)
        epoch = test.epoch(0)
        try:
            for batch in epoch:
                yield batch.to(self.device)
        finally:
            epoch.close()

    @torch.no_grad()
    def evaluate(self, model: nn.Module | None = None) -> tuple[float, float]:
        """Mean test loss and accuracy, per image or token; both NaN if the model has diverged."""
        model = model or self.model
        training = model.training
        model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        count = 0
        for batch in self.test_batches():
            with autocast(self.settings):
                logits = model(batch.inputs)
            loss += cross_entropies(logits, batch.targets).double().sum()
            right += (logits.argmax(-1) == batch.targets).sum()
            count += batch.targets.numel()
        model.train(training)
        mean = float(loss) / count
        return mean, int(right) / count if math.isfinite(mean) else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, loadable with `weights_only=True`. All ranks must call it."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "key": self.settings.key,
            "matched": [list(self.matched.lr_factors), self.matched.steps_factor],
            "step": self.step_count,
            "random": self.ranks.gather(torch.get_rng_state()),
            "callbacks": [callback.state_dict() for callback in self.callbacks],
        }
        if self.device.type == "cuda":
            state["random_cuda"] = self.ranks.gather(torch.cuda.get_rng_state(self.device))
        return state | {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume a run with the same settings."""
        if not self.continues(state):
            raise ValueError("this state belongs to another run")
        self.step_count = state["step"]
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"][self.ranks.rank].cpu())
        if self.device.type == "cuda":
            own = state["random_cuda"][self.ranks.rank].cpu()
            torch.cuda.set_rng_state(own, self.device)
        for callback, kept in zip(self.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(kept)
        self.close()

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether a state belongs to this run: same settings, factors and number of ranks."""
        own = [list(self.matched.lr_factors), self.matched.steps_factor]
        same = state.get("format") == FORMAT and state.get("key") == self.settings.key
        return same and state.get("matched") == own and len(state["random"]) == self.ranks.size

    def _parts(self) -> dict[str, Any]:
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "method": self.method,
            "stopwatch": self.stopwatch,
            "average": self.average,
            "scaler": self.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}
