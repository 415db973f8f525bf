"""The runs of a sweep, their order, and the factors of matched controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from lab.arms import Arm
from lab.errors import UserError
from lab.methods import make_method, make_recipe
from lab.optimizers import make_optimizer
from lab.runs import RunRecord
from lab.settings import Matched, RunSettings
from lab.tasks import build, check_name, known_sizes
from lab.torchrun import check_device, current


def plan(
    points: Sequence[RunSettings], arms: Sequence[Arm], seeds: Iterable[int]
) -> list[RunSettings]:
    """All runs, seed by seed, so that a stopped sweep has about as many runs of each arm.

    Args:
        points: Settings at which to compare the arms; their arm and seed are ignored.
        arms: In the order of the report; base always comes first.
        seeds: Seeds, from 0.
    """
    chosen = list(dict.fromkeys((Arm("base", task=points[0].task), *arms)))
    for arm in chosen:
        for need in arm.needs:
            if need not in chosen:
                raise UserError(
                    f"{arm.label} is matched to {need.label}; add {need.label} to --arms"
                )
    ordered = sorted(chosen, key=lambda arm: len(arm.needs) > 0)  # matched controls come last
    runs = [
        replace(point, arm=arm, seed=seed) for seed in seeds for point in points for arm in ordered
    ]
    return list({run.key: run for run in runs}.values())


def matched(run: RunSettings, find: Callable[[RunSettings], RunRecord | None]) -> Matched | None:
    """Factors of a matched control, from finished runs; None if these are missing."""
    found = {arm.name: find(replace(run, arm=arm)) for arm in run.arm.needs}
    known = {name: record for name, record in found.items() if record is not None}
    if len(known) < len(found):
        return None
    if run.arm.name == "lr-matched":
        return Matched(lr_factors=lr_factors(known["primum"], run.arm.lr_match == "epoch"))
    if run.arm.name == "time-matched":
        given = run.arm.time_factor
        return Matched(steps_factor=time_factor(known) if given is None else given)
    return Matched()


def lr_factors(primum: RunRecord, by_epoch: bool) -> tuple[float, ...]:
    """Mean weight of a sample in a run of primum: over the run, or per epoch."""
    factors = [1.0 + (extra or 0.0) for extra in primum.steps["mean_extra_weight"]]
    return tuple(factors) if by_epoch else (fmean(factors),)


def time_factor(runs: dict[str, RunRecord]) -> float:
    """Time of a step of primum relative to base, at least 1."""
    slow, quick = (runs[name].final["ms_per_step"] or 1.0 for name in ("primum", "base"))
    return max(1.0, slow / quick)


def check_runs(runs: Sequence[RunSettings]) -> None:
    """Raise before the first run if a device, arm or model cannot be used.

    Models are built if the shape of their data is known without loading it.
    """
    ranks = current()
    for run in runs:
        ranks.check(run)
    for device in dict.fromkeys(run.device for run in runs):
        check_device(device)
    for arm in dict.fromkeys(run.arm for run in runs):
        make_recipe(arm, seed=0)
    models = {(run.model, run.norm, run.optimizer, known_sizes(run)): run for run in runs}
    for run in models.values():
        sizes = known_sizes(run)
        if sizes is None:
            check_name(run)
            continue
        model = build(run, sizes)
        make_method(run, model, make_optimizer(run, model)).remove()
