"""Which runs a sweep consists of, in which order, and what the matched ones take over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from primum.experiments.runs import RunRecord
from primum.experiments.sweeps.arms import Arm, ArmError
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.training import Matched


def plan(
    points: Sequence[RunSettings], arms: Sequence[Arm], seeds: Iterable[int]
) -> list[RunSettings]:
    """All runs: seed by seed, so that a sweep that is stopped has about as many of each arm.

    Args:
        points: Settings to compare arms at; their own arm and seed do not count.
        arms: In the order of the report; base always comes first.
        seeds: Numbers from 0.
    """
    chosen = list(dict.fromkeys((Arm("base"), *arms)))
    for arm in chosen:
        for need in arm.needs:
            if need not in chosen:
                raise ArmError(f"{arm.label} takes its figures from {need.label}; add that arm")
    ordered = sorted(chosen, key=lambda arm: len(arm.needs) > 0)  # those who wait come last
    runs = [
        replace(point, arm=arm, seed=seed) for seed in seeds for point in points for arm in ordered
    ]
    return list({run.key: run for run in runs}.values())


def needed(run: RunSettings) -> Iterator[RunSettings]:
    """Runs that have to be finished before this one."""
    for arm in run.arm.needs:
        yield replace(run, arm=arm)


def matched(run: RunSettings, find: Callable[[RunSettings], RunRecord | None]) -> Matched | None:
    """What the run takes over from finished ones; None while they are not there."""
    found = {need.arm.name: find(need) for need in needed(run)}
    if any(record is None for record in found.values()):
        return None
    known = {name: record for name, record in found.items() if record is not None}
    if run.arm.name == "lr-matched":
        return Matched(lr_factors=lr_factors(known["primum"], run.arm.lr_match == "epoch"))
    if run.arm.name == "time-matched":
        given = run.arm.time_factor
        return Matched(steps_factor=time_factor(known) if given is None else given)
    return Matched()


def lr_factors(primum: RunRecord, by_epoch: bool) -> tuple[float, ...]:
    """Mean weight of a sample in a run of primum: over all of it, or over each epoch."""
    factors = [1.0 + (extra or 0.0) for extra in primum.steps["mean_extra_weight"]]
    return tuple(factors) if by_epoch else (fmean(factors),)


def time_factor(runs: dict[str, RunRecord]) -> float:
    """How much longer a step of primum took than one of base, but not shorter."""
    slow, quick = (runs[name].final["ms_per_step"] or 1.0 for name in ("primum", "base"))
    return max(1.0, slow / quick)
