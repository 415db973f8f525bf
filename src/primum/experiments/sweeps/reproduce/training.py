"""Runs of an accuracy table, and what they say about each of its cells."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from primum.experiments.runs import RunRecord
from primum.experiments.statistics import difference, holm, interval, smallest_effect
from primum.experiments.sweeps.arms import Arm
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.plan import plan
from primum.experiments.sweeps.progress import Progress
from primum.experiments.sweeps.ranks import current
from primum.experiments.sweeps.reproduce.accuracy import AccuracyTable, Cell
from primum.experiments.sweeps.reproduce.findings import Finding, Scale, beside, judge_gain
from primum.experiments.sweeps.reproduce.scales import scaled
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.summary import AgainstBase
from primum.experiments.sweeps.sweep import run_sweep

Found = Mapping[str, RunRecord]  # by key
Pair = tuple[list[RunRecord], list[RunRecord]]  # of an arm, and of base


def table_runs(
    table: AccuracyTable, scale: Scale, seeds: Sequence[int], device: str
) -> list[RunSettings]:
    """All runs of a table, seed by seed; cells may share some."""
    runs: list[RunSettings] = []
    for seed in seeds:
        for cell in table.cells:
            point = replace(scaled(cell.settings, scale), device=device)
            runs += plan([point], cell.arms, [seed])
    return list({run.key: run for run in runs}.values())


def run_table(
    table: AccuracyTable, scale: Scale, seeds: Sequence[int], place: Place, device: str
) -> list[Finding]:
    """Train what is missing, then judge each cell."""
    runs = table_runs(table, scale, seeds, device)
    records = run_sweep(runs, place, Progress() if current().leads else Progress(io.StringIO()))
    found = {run.key: record for run, record in zip(runs, records, strict=True)}
    return judge_table(table, scale, seeds, found, device)


def judge_table(
    table: AccuracyTable, scale: Scale, seeds: Sequence[int], found: Found, device: str
) -> list[Finding]:
    """Every cell: the paper's recipe against base, which is its claim; and primum beside it.

    The tests of a recipe over all cells are a family.
    """
    judged = [(cell, arm) for cell in table.cells for arm in cell.arms]
    pairs = [_pair(cell, arm, scale, seeds, found, device) for cell, arm in judged]
    tests = [
        _test(*pair, cell.figure) if len(pair[0]) == len(pair[1]) == len(seeds) else None
        for (cell, _), pair in zip(judged, pairs, strict=True)
    ]
    for name in {arm.name for _, arm in judged}:
        family = [place for place, (_, arm) in enumerate(judged) if arm.name == name]
        known = {place: test for place in family if (test := tests[place]) is not None}
        adjusted = holm([test.change.welch_p for test in known.values()])
        for (place, test), p in zip(known.items(), adjusted, strict=True):
            tests[place] = replace(test, adjusted_p=p)
    return [
        judge_cell(cell, arm, test, pair, scale)
        for (cell, arm), test, pair in zip(judged, tests, pairs, strict=True)
    ]


def judge_cell(cell: Cell, arm: Arm, test: AgainstBase | None, runs: Pair, scale: Scale) -> Finding:
    """What was found for one recipe in one cell."""
    gain = cell.ours - cell.base
    mine = arm.name == "primum"
    status, note = beside(test, scale) if mine else judge_gain(gain, test, scale)
    paper = f"{cell.base:.2f} -> {cell.ours:.2f} ({gain:+.2f})"
    paper += "" if cell.time is None else f", {cell.time:.2f}x"
    return Finding(
        claim=f"{cell.label}, primum" if mine else cell.label,
        paper="" if mine else paper,
        ours="–" if test is None else _shown(*runs, test, cell.figure),
        status=status,
        note=note,
        adjusted_p=None if test is None or math.isnan(test.adjusted_p) else test.adjusted_p,
    )


def _pair(
    cell: Cell, arm: Arm, scale: Scale, seeds: Sequence[int], found: Found, device: str
) -> Pair:
    """The runs of an arm and those of base, as far as there are any."""
    point = replace(scaled(cell.settings, scale), device=device)

    def of(each: Arm) -> list[RunRecord]:
        keys = [replace(point, arm=each, seed=seed).key for seed in seeds]
        return [found[key] for key in keys if key in found]

    return of(arm), of(Arm("base"))


def _test(runs: Sequence[RunRecord], base: Sequence[RunRecord], figure: str) -> AgainstBase | None:
    mine, plain = ([_percent(run, figure) for run in each] for each in (runs, base))
    change = difference(mine, plain)
    return AgainstBase(change, change.welch_p, smallest_effect(mine, plain))


def _shown(
    runs: Sequence[RunRecord], base: Sequence[RunRecord], test: AgainstBase, figure: str
) -> str:
    mine, plain = (interval([_percent(run, figure) for run in each]) for each in (runs, base))
    change = test.change.welch
    width = f" ± {change.half_width:.2f}" if change.count > 1 else ""
    times = [fmean(run.final["ms_per_step"] or 0.0 for run in each) for each in (runs, base)]
    ratio = f", {times[0] / times[1]:.2f}x" if times[1] else ""
    return f"{plain.mean:.2f} -> {mine.mean:.2f} ({change.mean:+.2f}{width}){ratio}"


def _percent(run: RunRecord, figure: str) -> float:
    value = run.final.get(figure)
    return 100 * value if value is not None else float("nan")
