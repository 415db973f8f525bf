"""Train one run, from scratch or from its checkpoint, and write its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from time import monotonic
from typing import Any

import torch

from lab.callbacks import Curves, Interference, MiddleBatch
from lab.errors import reading
from lab.looks import Looks
from lab.runs import RunRecord, commit, run_from
from lab.settings import Matched, RunSettings
from lab.shift_meter import CommonShift
from lab.stopwatch import use_threads
from lab.store import AGAIN, Store
from lab.tasks import load
from lab.torchrun import current
from lab.trainer import Callback, Trainer
from lab.views import Views

APART = 1 << 20  # distance between the seeds of two ranks, for dropout

OnStep = Callable[[int, int], object]  # steps taken, total steps


@dataclass(frozen=True)
class Place:
    """Where and how a sweep is run; none of this changes results.

    Args:
        store: Folder of runs and checkpoints.
        data_dir: Folder of the data; None uses the Hugging Face hub.
        cache_dir: Folder for decoded images.
        text: The file passed as `--text`, for language.
        checkpoint_seconds: Time between checkpoints; 0 saves after each step.
        workers: Number of parallel runs.
        threads: torch threads per run.
        data_workers: Processes per run that prepare batches.
        command: The command line, for the run record.
        environment: Versions and hardware, for the run record.
    """

    store: Store
    data_dir: str | None = None
    cache_dir: str | None = None
    text: str | None = None
    checkpoint_seconds: float = 30.0
    workers: int = 1
    threads: int = 1
    data_workers: int = 0
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def train_run(
    settings: RunSettings,
    factors: Matched,
    place: Place,
    on_step: OnStep = lambda done, steps: None,
) -> RunRecord:
    """Train a run to its end, from its checkpoint if there is one; write and return its record."""
    data = load(settings, place.data_dir, place.cache_dir, place.text)
    ranks = current()
    device = ranks.device(settings.device)
    with (
        use_threads(place.threads),
        own_random_numbers(settings.seed + APART * ranks.rank, device),
    ):
        trainer = Trainer(
            settings,
            data,
            default_callbacks(settings),
            matched=factors,
            data_workers=place.data_workers,
        )
        state = place.store.load_checkpoint(settings)
        if state is not None:
            with reading(place.store.checkpoint_path(settings), AGAIN):
                if trainer.continues(state):
                    trainer.load_state_dict(state)
        with closing(trainer):
            _train(trainer, place, on_step)
        # As it would be read from its file: None instead of NaN.
        record = run_from(make_record(trainer, place).as_dict())
    if ranks.leads:
        place.store.save_run(settings, record)
    ranks.wait()
    return record


def default_callbacks(settings: RunSettings) -> list[Callback]:
    """The callbacks of a run."""
    if settings.look is not None:
        return [Looks()]
    views = [Views()] if settings.views > 1 else []
    shift = [CommonShift()] if settings.shift_every is not None else []
    return [Curves(), Interference(), MiddleBatch(), *views, *shift]


def _train(trainer: Trainer, place: Place, on_step: OnStep) -> None:
    saved = monotonic()
    on_step(trainer.step_count, trainer.steps)
    while not trainer.finished:
        trainer.step()
        on_step(trainer.step_count, trainer.steps)
        alone = trainer.ranks.size == 1
        # All ranks must save at the same step, without communication.
        due = monotonic() - saved >= place.checkpoint_seconds if alone else trainer.between_epochs
        if due and not trainer.finished:
            trainer.stopwatch.stop()
            state = trainer.state_dict()
            if trainer.ranks.leads:
                place.store.save_checkpoint(trainer.settings, state)
            saved = monotonic()


def make_record(trainer: Trainer, place: Place) -> RunRecord:
    """The record of a run, finished or not."""
    settings = trainer.settings
    final: dict[str, float | None] = {}
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        part = callback.fields(trainer)
        final |= part.pop("final", {})
        found |= part
    final["ms_per_step"] = 1e3 * trainer.stopwatch.seconds_per_step
    taken: dict[str, Any] = {}
    if settings.arm.name == "lr-matched":
        taken = {"lr_factors": list(trainer.matched.lr_factors)}
    elif settings.arm.name == "time-matched":
        taken = {"steps_factor": trainer.matched.steps_factor}
    environment = dict(place.environment)
    if trainer.ranks.size > 1:
        environment["ranks"] = str(trainer.ranks.size)
    if trainer.device.type == "cuda":
        environment["device"] = torch.cuda.get_device_name(trainer.device)
    return RunRecord(
        name=settings.title,
        arm=settings.arm.label,
        seed=settings.seed,
        settings=settings.shared(),
        arm_settings={**settings.arm.settings(), "key": settings.key, **taken},
        environment=environment,
        command=place.command,
        commit=commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(trainer.stopwatch.seconds, 3),
        complete=trainer.finished,
        final=final,
        **found,
    )


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators (for dropout) in a block, and restore them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
