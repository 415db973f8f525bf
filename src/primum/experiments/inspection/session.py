"""Train and look, or load and look; what was found so far can be taken at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

import primum
from primum.diagnostics import InterferenceMeter
from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.images import Batches, ImageData
from primum.experiments.images.batches import Batch
from primum.experiments.inspection.checkpoint import load_checkpoint
from primum.experiments.inspection.moment import Moment, evaluate, look
from primum.experiments.inspection.protected import most_protected
from primum.experiments.inspection.settings import InspectError, InspectSettings
from primum.experiments.models import build_model
from primum.experiments.results import environment
from primum.experiments.runs import RunRecord

TEST_BATCH = 500
UNSEEN = 256  # test images on which each weighting's step is tried
LATER = 1 << 20  # epochs no training reaches: their order is for looking at alone


class Inspection:
    """A model under inspection.

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
        self.model = build_model(
            settings.model, data.classes, data.image_size, norm=settings.norm, seed=settings.seed
        )
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
        self.losses: list[torch.Tensor] = []
        self.meter = InterferenceMeter(num_samples=len(data.train))
        self.seconds = 0.0
        self.complete = False
        self._after_step = after_step

    def train(self) -> Iterator[int]:
        """Train to the end; after each look, yields the number of steps taken."""
        settings = self.settings
        begin = perf_counter()
        schedule = settings.make_schedule(self.optimizer)
        start = primum.attach if settings.reduce else primum.observe
        with start(self.model, self.optimizer, radius=settings.radius) as reducer:
            for step, batch in enumerate(self._endless()):
                last = step == settings.train_steps
                if last or step % settings.every == 0:
                    self.look(step, f"step {step}", first=batch)
                    self.seconds, self.complete = perf_counter() - begin, last
                    yield step
                if last:
                    return
                self.model.train()
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(batch.images), batch.targets)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                schedule.step()
                self.losses.append(loss.detach())
                self.meter.update(reducer.last, batch.ids, step)
                self._after_step()

    def load(self, checkpoints: Sequence[Path]) -> Iterator[int]:
        """Look at one checkpoint after the other; yields how many are done."""
        begin = perf_counter()
        for done, path in enumerate(checkpoints):
            found = load_checkpoint(path, self.model, self.optimizer)
            step = done if found.step is None else found.step
            self.look(step, path.name + ("" if found.with_optimizer else " (new optimizer)"))
            self.seconds = perf_counter() - begin
            self.complete = done + 1 == len(checkpoints)
            yield done + 1

    def look(self, step: int, label: str, first: Batch | None = None) -> None:
        """Measure the coming step on some batches, and the model on the test images.

        While training, the first of them is the batch the step will really be taken on.
        """
        settings = self.settings
        self.model.train()
        others = islice(self.batches.epoch(LATER + step), settings.batches - (first is not None))
        unseen = next(self._test(UNSEEN))
        for batch in [*([first] if first is not None else []), *others]:
            try:
                found = look(
                    self.model,
                    self.optimizer,
                    batch,
                    unseen,
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
        loss, accuracy = evaluate(self.model, self._test(TEST_BATCH))
        trained = torch.stack(self.losses[-settings.every :]).mean() if self.losses else torch.nan
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
            table["loss"] = torch.stack(self.losses).tolist()
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

    def _endless(self) -> Iterator[Batch]:
        for epoch in count():
            yield from self.batches.epoch(epoch)

    def _test(self, batch_size: int) -> Iterator[Batch]:
        test = Batches(
            self.data.test, self.data, batch_size=batch_size, shuffle=False, drop_last=False
        )
        return test.epoch(0)


def _environment() -> dict[str, str]:
    found = environment(1)
    del found["runs at a time, one thread each"]
    return found | {"threads": str(torch.get_num_threads())}
