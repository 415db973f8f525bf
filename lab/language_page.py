"""Tables and plots of docs/language.md, from stored runs; the metric is the held-out loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from lab.formatting import show, show_mean, with_p
from lab.plots import curves, error_bars, log_axis
from lab.results_page import commands, grid, machine, rates
from lab.results_plots import rates as rates_plot
from lab.runs import RunRecord
from lab.study_results import Results, named
from lab.tables import Group
from lab.text_tables import markdown_table
from primum.diagnostics.figures.style import canvas, looks, styled

DIGITS = 3
FADES = "radius_schedule=fade-linear"
arm_name = partial(named, language=True)


def common(group: Group) -> Group:
    """The group, restricted to seeds that all of its arms have."""
    seeds = set.intersection(*({run.seed for run in runs} for runs in group.arms.values()))
    arms = {arm: [run for run in runs if run.seed in seeds] for arm, runs in group.arms.items()}
    return replace(group, arms=arms)


def arms_table(group: Group) -> str:
    """A table of one setting, one row per arm."""
    tests, others = group.against_base("loss"), group.focus_against("loss")
    rows = [
        [
            arm_name(arm),
            str(len(group.arms[arm])),
            show(group.interval(arm, "loss"), DIGITS),
            with_p(tests.get(arm), DIGITS),
            with_p(others.get(arm), DIGITS),
            show_mean(group.interval(arm, "harmed_taken"), 0),
            show_mean(group.interval(arm, "extra_weight"), 2),
            show_mean(group.interval(arm, "time_ratio"), 2),
            show_mean(group.interval(arm, "steps_to_base"), 2),
            show_mean(group.interval(arm, "time_to_base"), 2),
        ]
        for arm in group.arms
    ]
    head = ["arm", "seeds", "loss, nats", "- base (Holm p)", "primum - arm (Holm p)", "harmed, %",
            "extra", "time x", "steps to", "time to"]  # fmt: skip
    return markdown_table(head, rows)


def long(results: Results) -> str:
    """Tables of a long run: final results of the arms, and the loss during training."""
    group = only(results, "long")
    shown = (250, 500, 1000, 2000, 3000)
    rows = []
    for arm, runs in group.arms.items():
        row = [arm_name(arm), *(_loss_at(runs, step) for step in shown)]
        row.append(show_mean(group.interval(arm, "steps_to_base"), 2))
        rows.append(row)
    table = markdown_table(["loss at step", *map(str, shown), "steps to"], rows)
    return f"{arms_table(group)}\n\n{table}"


def _loss_at(runs: Sequence[RunRecord], step: int) -> str:
    found = [
        dict(zip(run.curves["step"], run.curves["test_loss"], strict=True)).get(step)
        for run in runs
    ]
    known = [each for each in found if each is not None]
    return f"{fmean(known):.{DIGITS}f}" if len(known) == len(runs) else "–"


def only(results: Results, name: str) -> Group:
    """The group of a study with one setting; two studies are restricted to common seeds."""
    (group,) = results.groups(f"language-{name}")
    return common(group) if name in ("radius", "long") else group


def not_run(results: Results) -> str:
    """A table of the planned studies that have missing runs."""
    rows = []
    for name, runs in results.of("language").items():
        study = results.studies[name]
        if len(runs) < study["planned"]:
            rows.append([f"`{name}`", study["question"], f"{len(runs)} of {study['planned']}"])
    if not rows:
        return "All planned runs were made."
    return markdown_table(["study", "question", "runs made"], rows)


MAKERS: dict[str, Callable[[Results], str]] = {
    **{
        f"language-{name}": partial(rates, study=f"language-{name}")
        for name in ("rates-char", "rates-word", "sgd")
    },
    "language-batches": lambda r: grid(
        r, "language-batches", "sequences", lambda s: f"{s['batch_size']} x {s['length']}"
    ),
    "language-long": long,
    **{
        f"language-{name}": lambda r, name=name: arms_table(only(r, name))  # type: ignore[misc]
        for name in ("char", "word", "gpt2", "radius", "per", "bound", "more-controls")
    },
    "language-not-run": not_run,
    "language-commands": partial(commands, page="language"),
    "language-machine": partial(machine, page="language"),
}
PLOTS = {
    "language-rates-char": "Held-out loss by learning rate, characters: base and primum",
    "language-rates-word": "Held-out loss by learning rate, words: base and primum",
    "language-radius": "Held-out loss by radius, characters; base as a line",
    "language-long": "Held-out loss over ten times the steps, characters",
}


def language_plots(results: Results) -> dict[str, Figure]:
    """Plots by file name, for studies with runs."""
    drawn = {}
    for name, title in (("rates-char", "characters"), ("rates-word", "words")):
        if results.runs.get(f"language-{name}"):
            drawn[f"language-{name}"] = rates_plot(results.groups(f"language-{name}"), title)
    if results.runs.get("language-radius"):
        drawn["language-radius"] = by_radius(only(results, "radius"))
    if results.runs.get("language-long"):
        arms = {arm_name(arm): runs for arm, runs in only(results, "long").arms.items()}
        drawn["language-long"] = curves(arms, "test_loss", by="step", title="characters")
    return drawn


@styled
def by_radius(group: Group) -> Figure:
    """Plot the loss by radius, constant and fading, with base as a line."""
    figure, axes = canvas()
    look = looks(["base", "primum", "fading"])
    base = group.interval("base", "loss")
    assert base is not None
    axes.axhline(base.mean, color=look["base"].colour, linestyle=look["base"].dashes, label="base")
    width = float(np.nan_to_num(base.half_width))
    axes.axhspan(
        base.mean - width, base.mean + width, color=look["base"].colour, alpha=0.15, linewidth=0
    )
    for kind, fading in (("primum", False), ("fading", True)):
        points = []
        for arm, runs in group.arms.items():
            found = group.interval(arm, "loss")
            if arm != "base" and (FADES in arm) == fading and found is not None:
                points.append((runs[0].arm_settings["radius"], found))
        if points:
            points.sort(key=lambda point: point[0])
            label = "from the radius down to 0" if fading else "constant radius"
            error_bars(axes, points, look[kind], label)
    radii = {run.arm_settings["radius"] for run in group.runs if run.arm != "base"}
    log_axis(axes, sorted(radii), "radius")
    axes.set_ylabel(group.about("loss").heading)
    axes.set_title("characters")
    axes.legend()
    return figure
