"""Train and look, or load and look; what was found so far can be taken at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from primum.diagnostics import InterferenceMeter
from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.images import Batches, ImageData
from primum.experiments.images.batches import Batch
from primum.experiments.inspection.checkpoint import load_checkpoint
from primum.experiments.inspection.moment import Moment, evaluate, look
from primum.experiments.inspection.protected import most_protected
from primum.experiments.inspection.settings import InspectError, InspectSettings
from primum.experiments.inspection.watched import Watched
from primum.experiments.models import build_model
from primum.experiments.results import environment
from primum.experiments.runs import RunRecord

TEST_BATCH = 500
UNSEEN = 256  # test images on which each weighting's step is tried
LATER = 1 << 20  # epochs no training reaches: their order is for looking at alone


class Inspection:
    """A model under inspection: trained and looked at piece by piece, or loaded and looked at.

    Args:
        settings: What to train and when to look.
        data: `load_data(settings.data)`.
        command: What was typed, for the record.
        after_step: Called after each step of training and each look, for a progress bar.
    """

    def __init__(
        self,
        settings: InspectSettings,
        data: ImageData,
        *,
        command: str = "",
        after_step: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings, self.data, self.command = settings, data, command
        self.device = torch.device(settings.device)
        self.model = build_model(
            settings.model, data.classes, data.image_size, norm=settings.norm, seed=settings.seed
        ).to(self.device)
        self.optimizer = settings.make_optimizer(self.model)
        try:
            self.batches = Batches(
                data.train,
                data,
                batch_size=settings.batch_size,
                seed=settings.seed,
                augmentation=AUGMENTATIONS[settings.augment],
            )
        except ValueError as error:
            raise InspectError(str(error)) from error
        self.moments: list[Moment] = []
        self.curves: dict[str, list[float]] = {}
        self.meter = InterferenceMeter(num_samples=len(data.train))
        self.seconds = 0.0
        self.complete = False
        self._after_step = after_step
        self._watched: Watched | None = None

    def train(self) -> Iterator[int]:
        """Train to the end; after each look, yields the number of steps taken."""
        try:
            while not self.complete:
                if self.advance():
                    yield self.training.step_count
        finally:
            self.close()

    @property
    def training(self) -> Watched:
        """What trains; it holds on to the model from when it is first asked for."""
        if self._watched is None:
            self._watched = Watched(
                self.settings, self.model, self.optimizer, self.batches, self.meter
            )
        return self._watched

    def advance(self) -> bool:
        """Measure a batch of a look that is due, or else take a step; whether a look has ended."""
        begin = perf_counter()
        training, ended = self.training, False
        step = training.step_count
        last = step == self.settings.train_steps
        looked = bool(self.curves) and self.curves["step"][-1] == step
        if (last or step % self.settings.every == 0) and not looked:
            measured = sum(moment.step == step for moment in self.moments)
            self.measure(measured, step, f"step {step}", training.coming)
            ended = measured + 1 == self._measurable(training.coming)
            if ended:
                self._end_look(step)
                self.complete = last
        else:
            training.step()
            self._after_step()
        self.seconds += perf_counter() - begin
        return ended

    def close(self) -> None:
        """Let go of the model; what was found stays."""
        if self._watched is not None:
            self._watched.close()

    def state_dict(self) -> dict[str, Any]:
        """Of training, and what was found so far; loads with `weights_only=True`."""
        return {
            "training": self.training.state_dict(),
            "moments": [moment.as_dict() for moment in self.moments],
            "curves": {name: list(column) for name, column in self.curves.items()},
            "seconds": self.seconds,
            "complete": self.complete,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up an inspection of the same settings."""
        self.training.load_state_dict(state["training"])
        self.moments = [Moment(**moment) for moment in state["moments"]]
        self.curves = {name: list(column) for name, column in state["curves"].items()}
        self.seconds, self.complete = state["seconds"], state["complete"]

    def load(self, checkpoints: Sequence[Path]) -> Iterator[int]:
        """Look at one checkpoint after the other; yields how many are done."""
        begin = perf_counter()
        for done, path in enumerate(checkpoints):
            found = load_checkpoint(path, self.model, self.optimizer)
            step = done if found.step is None else found.step
            label = path.name + ("" if found.with_optimizer else " (new optimizer)")
            for number in range(self._measurable(None)):
                self.measure(number, step, label)
            self._end_look(step)
            self.seconds = perf_counter() - begin
            self.complete = done + 1 == len(checkpoints)
            yield done + 1

    def measure(self, number: int, step: int, label: str, first: Batch | None = None) -> None:
        """Measure the coming step on one batch of a look.

        While training, the first of them is the batch the step will really be taken on.
        """
        settings = self.settings
        self.model.train()
        if first is None or number > 0:
            others = self.batches.epoch(LATER + step, number - (first is not None))
            batch = next(others).to(self.device)
        else:
            batch = first
        try:
            found = look(
                self.model,
                self.optimizer,
                batch,
                self._unseen,
                step=step,
                label=label,
                radius=settings.radius,
                lr_factors=settings.lr_factors,
            )
        except ValueError as error:
            way_out = "; or choose --norm group" if "BatchNorm" in str(error) else ""
            raise InspectError(f"{settings.model}: {error}{way_out}") from error
        self.moments.append(found)
        self._after_step()

    def _measurable(self, first: Batch | None) -> int:
        """How many batches a look has; those after `first` come from an epoch of their own."""
        return min(self.settings.batches, len(self.batches) + (first is not None))

    def _end_look(self, step: int) -> None:
        """The model on the test images."""
        loss, accuracy = evaluate(self.model, self._test(TEST_BATCH))
        losses = self._losses[-self.settings.every :]
        trained = torch.stack(losses).mean() if losses else torch.nan
        row = {
            "epoch": step / len(self.batches),
            "step": step,
            "train_loss": float(trained),
            "test_loss": loss,
            "test_accuracy": accuracy,
        }
        for name, value in row.items():
            self.curves.setdefault(name, []).append(value)

    def record(self) -> RunRecord:
        """What was found so far."""
        settings, steps = self.settings, self.meter.table()
        table: dict[str, list[Any]] = dict(steps) if self.meter.steps else {}
        if table:
            table["loss"] = torch.stack(self._losses).tolist()
        final = {key: self.curves[key][-1] for key in ("test_loss", "test_accuracy") if self.curves}
        return RunRecord(
            name=settings.title,
            arm="primum" if settings.reduce else "base",
            seed=settings.seed,
            settings=settings.as_dict(),
            arm_settings={"reduce": settings.reduce},
            environment=_environment(),
            command=self.command,
            seconds=round(self.seconds, 1),
            complete=self.complete,
            curves=self.curves,
            steps=table,
            final=dict(final),
            moments=[moment.as_dict() for moment in self.moments],
            protected=most_protected(self.meter, self.data) if table else [],
        )

    @property
    def _losses(self) -> list[torch.Tensor]:
        return [] if self._watched is None else self._watched.losses

    @cached_property
    def _unseen(self) -> Batch:
        return next(self._test(UNSEEN))

    def _test(self, batch_size: int) -> Iterator[Batch]:
        test = Batches(
            self.data.test, self.data, batch_size=batch_size, shuffle=False, drop_last=False
        )
        return (batch.to(self.device) for batch in test.epoch(0))


def _environment() -> dict[str, str]:
    found = environment(1)
    del found["runs at a time, one thread each"]
    return found | {"threads": str(torch.get_num_threads())}
