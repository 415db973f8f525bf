"""Findings on the paper's claims, from runs and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lab import claims
from lab.arms import Arm
from lab.claims import TABLES
from lab.formatting import show
from lab.judge import Finding, judge_gain, judge_statement
from lab.runs import RunRecord
from lab.scales import Scale, figure1_runs, scaled
from lab.settings import RunSettings
from lab.statistics import Difference, family, interval
from lab.tables import metrics_of, of_weighting

Runs = Mapping[str, Mapping[str, Sequence[RunRecord]]]  # by cell or network, then by arm


def cells_of(
    name: str, scale: Scale, seeds: Sequence[int], device: str = "cpu"
) -> dict[str, dict[str, list[RunSettings]]]:
    """The runs of an experiment; none for those measured by a script in `lab/bench`."""
    found: dict[str, dict[str, list[RunSettings]]] = {}
    if name in TABLES:
        for cell in TABLES[name].cells:
            point = replace(scaled(cell.settings, scale), device=device)
            found[cell.label] = {
                arm.name: [replace(point, arm=arm, seed=seed) for seed in seeds]
                for arm in (Arm("base"), *cell.arms)
            }
    elif name == "figure1":
        networks = figure1_runs(scale).items()
        found = {label: {"base": [replace(run, device=device)]} for label, run in networks}
    return found


def runs_of(
    name: str, scale: Scale, seeds: Sequence[int], device: str = "cpu"
) -> list[RunSettings]:
    """The runs of an experiment in the order of training, seed by seed; each occurs once."""
    runs = [
        run
        for seed in seeds
        for arms in cells_of(name, scale, [seed], device).values()
        for own in arms.values()
        for run in own
    ]
    return list({run.key: run for run in runs}.values())


def records_of(
    cells: Mapping[str, Mapping[str, Sequence[str]]], found: Mapping[str, RunRecord]
) -> Runs:
    """The finished runs of an experiment, from their keys."""
    return {
        label: {arm: [found[key] for key in keys] for arm, keys in arms.items()}
        for label, arms in cells.items()
    }


def findings_of(
    name: str, scale: Scale, runs: Runs, scripts: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Judge all claims of an experiment.

    Args:
        name: Name of the experiment.
        scale: Scale of its runs.
        runs: Its finished runs; claims without runs are "not run".
        scripts: Results of scripts in `lab/bench`, by name.
    """
    if name in TABLES:
        return judge_table(name, scale, runs)
    if name == "figure1":
        return [
            each
            for label, arms in runs.items()
            for run in arms["base"]
            for each in judge_moments(label, _last_moments(run), scale)
        ]
    if name == "multilayer":
        tails = [run for arms in runs.values() for own in arms.values() for run in own]
        return judge_blocks(tails, scale) if len(tails) > 1 else []
    scripts = scripts or {}
    if name == "figure2":
        return [
            each
            for source, content in scripts.items()
            for group in content["groups"]
            for each in judge_solver(source, group, scale)
        ]
    return [judge_size(row, scale) for content in scripts.values() for row in content["sizes"]]


def judge_table(name: str, scale: Scale, found: Runs) -> list[Finding]:
    """Two findings per cell: the paper's recipe against base (the claim), and primum against base.

    The tests of a recipe over all cells are one family.
    """
    cells = [(cell, arm) for cell in TABLES[name].cells for arm in cell.arms]
    runs: dict[tuple[str, str], tuple[Sequence[RunRecord], Sequence[RunRecord]]] = {}
    values: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for cell, arm in cells:
        arms, place = found.get(cell.label, {}), (cell.label, arm.name)
        if arm.name in arms and "base" in arms:
            mine, plain = runs[place] = arms[arm.name], arms["base"]
            metrics = [[metrics_of(run)[cell.metric] for run in each] for each in (mine, plain)]
            own, base = ([each for each in some if each is not None] for some in metrics)
            if len(own) == len(base) == len(mine) == len(plain):
                values[place] = own, base
    tests: dict[tuple[str, str], Difference] = {}
    for recipe in ("paper", "primum"):
        tests |= family({place: pair for place, pair in values.items() if place[1] == recipe})
    judged = []
    for cell, arm in cells:
        gain, place, ours = cell.ours - cell.base, (cell.label, arm.name), "–"
        if place in tests:
            after, before = (interval(each).mean for each in values[place])
            ours = f"{before:.2f} -> {after:.2f} ({show(tests[place].interval, 2, sign='+')})"
            slow, quick = (
                fmean(run.final["ms_per_step"] or 0.0 for run in each) for each in runs[place]
            )
            ours += f", {slow / quick:.2f}x" if quick else ""
        if arm.name == "paper":
            paper = f"{cell.base:.2f} -> {cell.ours:.2f} ({gain:+.2f})"
            paper += "" if cell.time is None else f", {cell.time:.2f}x"
            judged.append(judge_gain(cell.label, paper, gain, tests.get(place), ours, scale))
        else:
            label = f"{cell.label}, primum"
            judged.append(judge_gain(label, "", None, tests.get(place), ours, scale))
    return judged


def _last_moments(run: RunRecord) -> list[dict[str, Any]]:
    last = max(moment["step"] for moment in run.moments)
    return [moment for moment in run.moments if moment["step"] == last]


def judge_moments(label: str, moments: Sequence[dict[str, Any]], scale: Scale) -> list[Finding]:
    """Judge Figure 1's three statements about one network."""
    head = fmean(moment["error"][-1] for moment in moments)
    middle = fmean(moment["error"][len(moment["error"]) // 2] for moment in moments)
    known = of_weighting(moments, "reor", "paper")
    positive = fmean(reor > 0 for reor in known) if known else math.nan
    mean = fmean(known) if known else math.nan
    return [
        judge_statement(f"{label}: ", claims.HEAD_ERROR, head, f"{head:.2f}", scale,
                        f"mean over {len(moments)} batches"),
        judge_statement(f"{label}: ", claims.ERROR_FALLS, head - middle,
                        f"{head:.2f} (last), {middle:.2f} (half of them)", scale),
        judge_statement(f"{label}: ", claims.POSITIVE, positive,
                        f"{100 * positive:.0f}%, mean {mean:+.2f}", scale,
                        "weights of the paper's recipe"),
    ]  # fmt: skip


def judge_blocks(runs: Sequence[RunRecord], scale: Scale) -> list[Finding]:
    """Judge Figure 11's statements; runs are plain training, then by number of blocks."""
    plain, first, last = runs[0], runs[1], runs[-1]
    blocks = [int(run.arm_settings["blocks"]) for run in runs]
    accuracies = [100 * (run.final["test_accuracy"] or 0.0) for run in runs]
    ms, size = ([run.final[name] or 0.0 for run in (plain, first, last)]
                for name in ("ms_per_step", "peak_bytes"))  # fmt: skip
    slower, larger = ms[2] / ms[1], size[2] / max(1, size[1])
    spread = max(accuracies) - min(accuracies)
    shown = ", ".join(f"{n}: {value:.2f}" for n, value in zip(blocks, accuracies, strict=True))
    against = f", last {blocks[-1]} blocks against the last one"
    mib = 2**20
    return [
        judge_statement("", _with(claims.SLOWER, against), slower,
                        f"{ms[2]:.0f} ms, {slower:.1f}x (plain {ms[0]:.0f} ms)", scale),
        judge_statement("", _with(claims.LARGER, against), larger,
                        f"{size[2] / mib:.0f} MiB, {larger:.1f}x (plain {size[0] / mib:.0f} MiB)",
                        scale),
        judge_statement("", claims.FLUCTUATES, spread, f"spread {spread:.2f} points ({shown})",
                        scale, "same seed, extra weights zero"),
    ]  # fmt: skip


def _with(statement: claims.Statement, more: str) -> claims.Statement:
    return statement._replace(label=statement.label + more)


def judge_solver(data: str, group: Mapping[str, Any], scale: Scale) -> list[Finding]:
    """Judge Figure 2: how much the paper's solver removes, and whether it converges early.

    The paper does not give the tolerance of its stopping criterion, so convergence is judged by the
    share of what many more iterations remove.
    """
    label = f"{data}, {group['optimizer']}, B={group['batch']}: "
    arms = [problem["arms"] for problem in group["problems"]]
    most, many = f"paper {claims.MOST_ITERS}", f"paper {claims.MANY_ITERS}"
    removed = fmean(each[most]["removed"] for each in arms)
    early = fmean(each[most]["iterations"] < claims.MOST_ITERS for each in arms)
    followed = [each for each in arms if many in each]
    reached = fmean(each[many]["removed"] for each in followed) if followed else 0.0
    in_time = fmean(each[most]["removed"] for each in followed) if followed else 0.0
    share = None if not followed else in_time / reached if reached else 1.0
    return [
        judge_statement(label, claims.REMOVED, removed,
                        f"{100 * removed:.0f}%, mean of {len(arms)} problems", scale),
        judge_statement(label, claims.CONVERGES, share,
                        f"{100 * in_time:.0f}% after {claims.MOST_ITERS}, "
                        f"{100 * reached:.0f}% after {claims.MANY_ITERS:,}", scale,
                        f"stops by a tolerance of 1e-05 on {100 * early:.0f}%"),
    ]  # fmt: skip


def judge_size(row: Mapping[str, Any], scale: Scale) -> Finding:
    """Judge Tables 3 and 4: is the factorised matrix faster where it is in the paper?"""
    label = f"{row['optimizer']}, {row['inputs']}x{row['outputs']}, B={row['batch']}"
    explicit, factorised = row["paper_explicit"], row["paper_factorised"]
    if factorised is None:
        return Finding(label, "not in the paper", "–", "not judged")
    before = f"{explicit[0]:g}" if explicit else "out of memory"
    paper = f"{before} -> {factorised[0]:g} ms"
    mine = row["ms"].get("explicit"), row["ms"].get("factorised")
    ours = (
        f"{_ms(mine[0])} -> {_ms(mine[1])} ms; "
        f"primum with its products {_ms(row['ms'].get('primum'))} ms"
    )
    if None in mine or explicit is None:
        return Finding(label, paper, ours, "not run", "the explicit matrix is too large")
    same = (mine[1] < mine[0]) == (factorised[0] < explicit[0])
    faster = "factorised" if mine[1] < mine[0] else "explicit"
    statement = claims.Statement(label, paper, least=1)
    note = "" if same else f"here the {faster} one is faster"
    return judge_statement("", statement, float(same), ours, scale, note)


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
