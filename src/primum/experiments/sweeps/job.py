"""One run from start, or checkpoint, to its file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import torch

from primum.experiments.images import load_data
from primum.experiments.runs import FORMAT, RunRecord, run_from, without_nan
from primum.experiments.sweeps.build import own_random_numbers
from primum.experiments.sweeps.ranks import current
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.store import Store
from primum.experiments.sweeps.training import Matched, Training

APART = 1 << 20  # between the seeds of two ranks, for dropout and the like

OnStep = Callable[[int, int], object]  # steps taken, steps in all


@dataclass(frozen=True)
class Place:
    """Where a sweep takes place; nothing here changes a result.

    Args:
        store: Runs and checkpoints.
        data_dir: Folder of the data; None is the hub.
        cache_dir: Where decoded images are kept.
        checkpoint_seconds: From one checkpoint to the next; 0 is after each step.
        workers: Runs at the same time.
        threads: Of torch, in each of them.
        data_workers: Processes that prepare batches, for each of them; 0 leaves it to the run's.
        command: What was typed, for the record.
        environment: Versions and hardware, likewise.
    """

    store: Store
    data_dir: str | None = None
    cache_dir: str | None = None
    checkpoint_seconds: float = 30.0
    workers: int = 1
    threads: int = 1
    data_workers: int = 0
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def run_job(
    settings: RunSettings,
    matched: Matched,
    place: Place,
    on_step: OnStep = lambda done, steps: None,
) -> RunRecord:
    """Train to the end, or from where it was left; write the run and return it."""
    data = load_data(settings.data_settings(place.data_dir, place.cache_dir))
    ranks = current()
    device = ranks.device(settings.device)
    before = torch.get_num_threads()
    torch.set_num_threads(place.threads)
    try:
        with own_random_numbers(settings.seed + APART * ranks.rank, device):
            training = Training(settings, data, matched, data_workers=place.data_workers)
            state = place.store.load_checkpoint(settings)
            if state is not None and training.continues(state):
                training.load_state_dict(state)
            with closing(training):
                _train(training, place, on_step)
            # As it will be read from its file: no number at all instead of a NaN.
            made = {"format": FORMAT, **asdict(make_record(training, place))}
            record = run_from(without_nan(made))
    finally:
        torch.set_num_threads(before)
    if ranks.leads:
        place.store.save_run(settings, record)
    ranks.wait()
    return record


def _train(training: Training, place: Place, on_step: OnStep) -> None:
    saved = monotonic()
    on_step(training.step_count, training.steps)
    while not training.finished:
        training.step()
        on_step(training.step_count, training.steps)
        alone = training.ranks.size == 1
        # Several ranks have to agree on when, without asking each other.
        due = monotonic() - saved >= place.checkpoint_seconds if alone else training.between_epochs
        if due and not training.finished:
            training.stopwatch.stop()
            state = training.state_dict()
            if training.ranks.leads:
                place.store.save_checkpoint(training.settings, state)
            saved = monotonic()


def make_record(training: Training, place: Place) -> RunRecord:
    """What is written down of a finished run."""
    settings, curves = training.settings, training.curves
    final: dict[str, float | None] = {
        name: values[-1]
        for name, values in curves.items()
        if name.endswith(("loss", "accuracy")) or name == "step"
    }
    final["ms_per_step"] = 1e3 * training.stopwatch.seconds_per_step
    final["fallbacks"] = training.reports["fallbacks"][-1]
    steps: dict[str, list[Any]] = {
        **training.reports,
        "applied": [training.method.weighs] * len(training.reports["step"]),
    }
    return RunRecord(
        name=settings.title,
        arm=settings.arm.label,
        seed=settings.seed,
        settings=settings.shared(),
        arm_settings={**settings.arm.settings(), "key": settings.key, **_taken_over(training)},
        environment=_environment(training, place),
        command=place.command,
        seconds=round(training.stopwatch.seconds, 3),
        curves=dict(curves),
        steps=steps,
        final=final,
    )


def _taken_over(training: Training) -> dict[str, Any]:
    name, matched = training.settings.arm.name, training.matched
    if name == "lr-matched":
        return {"lr_factors": list(matched.lr_factors)}
    return {"steps_factor": matched.steps_factor} if name == "time-matched" else {}


def _environment(training: Training, place: Place) -> dict[str, str]:
    found, device = dict(place.environment), training.device
    if training.ranks.size > 1:
        found["ranks"] = str(training.ranks.size)
    if device.type != "cuda":
        return found
    return {**found, "device": torch.cuda.get_device_name(device)}
