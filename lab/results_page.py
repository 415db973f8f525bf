"""Tables of docs/results.md, docs/claims.md and docs/guide.md, from stored runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from lab.budgets import Budgets, tuning_table
from lab.default_radius import rule_table
from lab.defaults import OPTIMIZERS
from lab.formatting import show, show_mean, with_p
from lab.parts_page import parts_table
from lab.runs import environments
from lab.second_look_page import second_look_table
from lab.shift_page import shift_table
from lab.spread import spread_table
from lab.statistics import Difference, family, interval
from lab.study_results import MAIN, NAMES, Results, in_words, named
from lab.tables import Group
from lab.text_tables import markdown_table
from lab.tuned_page import rate_table, speed_table

RADII = {"base": "0", "primum@radius=0.1": "0.1", "primum": "0.2", "primum@radius=0.4": "0.4",
         "primum@radius=0.8": "0.8"}  # fmt: skip
NOT_RUN = "Not run yet."
NORMS = {"cnn-whitened": "batch", "vit-micro": "layer"}  # of models that have no other
BEST = "primum@radius=0.4"  # the library's default radius
_SGD, _ADAMW, _GROUP = {"optimizer": "sgd"}, {"optimizer": "adamw"}, {"norm": "group"}
_CNN, _RESNET = {"model": "cnn-small"}, {"model": "resnet20"}
HEADLINE: dict[str, dict[str, Any]] = {  # rows of the README, and the settings that select the runs
    "ResNet-20, 20,000 images, SGD, 15 epochs": _RESNET | _SGD | _GROUP,
    "the same": _RESNET | {"norm": "batch", "lr": 0.2},
    "small CNN, 20,000 images, SGD, 30 epochs": _CNN | _SGD | _GROUP,
    "the same ": _CNN | {"norm": "batch"},
    "small transformer, 20,000 images, AdamW, 15 epochs": {"model": "vit-micro"} | _ADAMW,
    "a strong recipe, all 50,000 images, SGD, 8 epochs": {"epochs": 8},
}


def headline(results: Results) -> str:
    """The README's table: base and primum at the default radius, where base was tuned."""
    speedrun, tuned = Budgets(results.runs["speedrun"]), dict(enumerate(results.groups("tuned")))
    found = []
    for groups, tests in (
        (speedrun.groups, {(n, arm): test for (arm, n), test in speedrun.tests().items()}),
        (tuned, grid_tests(list(tuned.values()))),
    ):
        found += [(group, tests[place, BEST]) for place, group in groups.items()]
    rows = []
    for words, wanted in HEADLINE.items():
        ((group, test),) = [each for each in found if wanted.items() <= each[0].settings.items()]
        base, own = (group.table.loc[arm][group.judged_by].mean() for arm in ("base", BEST))
        gain = show(test.interval, 1, sign="+")
        gain = f"**{gain}**" if test.seen else f"{gain} (n.s.)"
        norm = group.settings["norm"] or NORMS[group.settings["model"]]
        rows.append([words.strip(), norm, f"{base:.1f}%", f"{own:.1f}%", gain])
    about = "test accuracy on CIFAR-10, learning rate tuned for base"
    return markdown_table([about, "norm", "base", "primum", "difference, points"], rows)


def overview(results: Results, *, tuned: bool) -> str:
    """Settings that were tuned for base, or the others: base, and what each recipe adds."""
    rows = []
    for row in (row for row in results.overview if row.tuned == tuned):
        cells = [row.name, show(row.group.interval("base", row.group.judged_by), 1)]
        for arm in MAIN:
            text = "–"
            if arm in row.tests:
                found = row.tests[arm].interval
                text = f"{show(found, 1, sign='+')} ({found.count})"
                text = f"**{text}**" if row.tests[arm].seen else text
            cells.append(text)
        rows.append(cells)
    return markdown_table(["setting", "base, %", *(f"{named(arm)} - base" for arm in MAIN)], rows)


def default(results: Results) -> str:
    """The table of the rule for the default radius."""
    settings = results.default_radius()
    return rule_table(settings) if settings else NOT_RUN


def arms_table(results: Results, study: str) -> str:
    """A table for each setting of an image study, one row per arm."""
    parts, groups = [], results.groups(study)
    for group in groups:
        tests, others = group.against_base("accuracy"), group.focus_against("accuracy")
        rows = [
            [*_arm(group, arm, tests), with_p(others.get(arm)),
             show(group.interval(arm, "loss"), 3),
             show_mean(group.interval(arm, "harmed_taken"), 0),
             show_mean(group.interval(arm, "extra_weight"), 2),
             show_mean(group.interval(arm, "time_ratio"), 2),
             show(group.interval(arm, "steps_to_base"), 2)]
            for arm in group.arms
        ]  # fmt: skip
        head = ["arm", "seeds", "accuracy, %", "- base (Holm p)", "primum - arm (Holm p)",
                "test loss", "harmed, %", "extra", "time x", "steps to"]  # fmt: skip
        title = f"{in_words(group.settings)}:\n\n" if len(groups) > 1 else ""
        parts.append(title + markdown_table(head, rows))
    return "\n\n".join(parts)


def shown_by(groups: Sequence[Group]) -> tuple[str, int, str]:
    """The metric that groups are judged by, its digits and its unit."""
    accuracy = all(group.judged_by == "accuracy" for group in groups)
    return ("accuracy", 1, "%") if accuracy else ("loss", 3, "nats")


def _arm(group: Group, arm: str, tests: dict[str, Difference]) -> list[str]:
    seeds = str(len(group.arms[arm]))
    return [named(arm), seeds, show(group.interval(arm, "accuracy"), 1), with_p(tests.get(arm))]


def grid(results: Results, study: str, heading: str, label: Callable[[dict[str, Any]], str]) -> str:
    """A study with several settings, one row each; all differences are one family."""
    groups = results.groups(study)
    metric, digits, unit = shown_by(groups)
    arms = [arm for arm in MAIN if any(arm in group.arms for group in groups)]
    tests = grid_tests(groups)
    rows = []
    for place, group in enumerate(groups):
        found = [tests.get((place, arm)) for arm in arms]
        missed = [test.smallest for test in found if test is not None and not test.seen]
        base = show(group.interval("base", metric), digits)
        changes = [with_p(test, digits) for test in found]
        row = [label(group.settings), str(len(group.arms["base"])), base, *changes]
        seen = missed and not any(math.isnan(each) for each in missed)
        rows.append([*row, f"{max(missed):.{digits}f}" if seen else "–"])
    names = [named(arm, language=groups[0].language) for arm in arms]
    head = [heading, "seeds", f"base, {unit}", *(f"{name} - base (Holm p)" for name in names)]
    return markdown_table([*head, "could see"], rows)


def grid_tests(groups: Sequence[Group]) -> dict[tuple[int, str], Difference]:
    """Every arm minus base in every setting, by place and arm; all of them are one family."""
    metric, _, _ = shown_by(groups)
    pairs = {(n, arm): g.pair(arm, "base", metric) for n, g in enumerate(groups) for arm in MAIN}
    return family(pairs)


def radius(results: Results) -> str:
    """Accuracy and mean extra weight by radius, for each optimizer."""
    groups = {OPTIMIZERS[group.settings["optimizer"]]: group for group in results.groups("radius")}
    rows = []
    for arm, value in RADII.items():
        row = [value]
        for group in groups.values():
            row += [
                show(group.interval(arm, "accuracy"), 1),
                show(group.interval(arm, "loss"), 3),
                show_mean(group.interval(arm, "harmed_taken"), 0),
                show_mean(group.interval(arm, "extra_weight"), 2),
            ]
        rows.append(row)
    head = ["radius"]
    for name in groups:
        head += [f"{name}: accuracy, %", "test loss", "harmed, %", "extra"]
    return markdown_table(head, rows)


def rates(results: Results, study: str) -> str:
    """Accuracy or loss by learning rate, best against best, and time per step relative to base.

    A best rate at the edge of the grid is marked.
    """
    groups = sorted(results.groups(study), key=lambda group: group.settings["lr"])
    metric, digits, _ = shown_by(groups)
    choose = max if metric == "accuracy" else min
    named_arms = dict.fromkeys((*MAIN, *(arm for group in groups for arm in group.arms)))
    arms = ["base", *(a for a in named_arms if a != "base" and any(a in g.arms for g in groups))]
    means = {arm: [group.interval(arm, metric) for group in groups] for arm in arms}
    rows = [
        [f"{group.settings['lr']:g}", *(show(means[arm][place], digits) for arm in arms)]
        for place, group in enumerate(groups)
    ]
    best = {
        arm: choose((found.mean, place) for place, found in enumerate(values) if found is not None)[
            1
        ]
        for arm, values in means.items()
    }
    row = ["best"]
    for arm, place in best.items():
        edge = " (edge)" if place in (0, len(groups) - 1) else ""
        row.append(f"{show(means[arm][place], digits)} at {groups[place].settings['lr']:g}{edge}")
    rows.append(row)
    ends = {arm: groups[place].table.loc[arm][metric].tolist() for arm, place in best.items()}
    tests = family({arm: (ends[arm], ends["base"]) for arm in arms[1:]})
    changes = [show(test.interval, digits, sign="+") for test in tests.values()]
    rows.append(["best - best of base", "–", *changes])
    ratios = {arm: [g.interval(arm, "time_ratio") for g in groups] for arm in arms}
    known = {arm: [each.mean for each in found if each] for arm, found in ratios.items()}
    rows.append(["time x", *(f"{fmean(each):.2f}" if each else "–" for each in known.values())])
    names = [named(arm, language=groups[0].language) for arm in arms]
    return markdown_table(["learning rate", *names], rows)


def rivals(results: Results) -> str:
    """Best against best, once the rivals have runs; base's runs are shared with `upgrad`."""
    there = any(run.arm == "mgda" for run in results.runs["rivals"])
    return rates(results, "rivals") if there else NOT_RUN


def long(results: Results) -> str:
    """A long schedule: last epoch, training and test loss, and accuracy during training."""
    (group,) = results.groups("long-sgd")
    tests, rows = group.against_base("accuracy"), []
    for arm, runs in group.arms.items():
        losses = [run.final["train_loss"] for run in runs]
        row = _arm(group, arm, tests)
        row.append(f"{tests[arm].smallest:.1f}" if arm in tests else "–")
        row.append(show(group.interval(arm, "steps_to_base"), 2))
        row.append(show(interval([each for each in losses if each is not None]), 3))
        row.append(show(group.interval(arm, "loss"), 3))
        for epoch in (5, 10, 20, 40):
            place = runs[0].curves["epoch"].index(epoch)
            row.append(f"{100 * fmean(run.curves['test_accuracy'][place] for run in runs):.1f}")
        rows.append(row)
    head = ["arm", "seeds", "accuracy, %", "- base (Holm p)", "could see", "steps to",
            "train loss, last 5 epochs", "test loss", "epoch 5", "10", "20", "40"]  # fmt: skip
    return markdown_table(head, rows)


def verdicts(results: Results) -> str:
    """One row per experiment of the paper."""
    rows = [[outcome.title, outcome.verdict] for outcome in results.outcomes]
    return markdown_table(["part of the paper", "at `small`"], rows)


def claims(results: Results) -> str:
    """The findings of all experiments, claim by claim."""
    return "\n\n".join(outcome.markdown(level=2) for outcome in results.outcomes)


def machine(results: Results, page: str = "results") -> str:
    """Versions and hardware of the runs of a page."""
    found = environments(run for runs in results.of(page).values() for run in runs)
    return markdown_table(["", ""], [[name, ", ".join(values)] for name, values in found.items()])


def commands(results: Results, page: str = "results") -> str:
    """The commands of the studies, with their number of runs."""
    parts = []
    for name, runs in results.of(page).items():
        study, made = results.studies[name], len(runs)
        if made:
            rest = "" if made == study["planned"] else f" of {study['planned']}"
            parts.append(f"* `{name}`, {made}{rest} runs: `{study['command']}`")
    return "\n".join(parts)


MAKERS: dict[str, Callable[[Results], str]] = {
    "headline": headline,
    "overview": partial(overview, tuned=True),
    "overview-short": partial(overview, tuned=False),
    "default": default,
    "radius": radius,
    "long-sgd": long,
    "noise": lambda r: grid(r, "noise", "wrong labels", lambda s: f"{s['label_noise']:.0%}"),
    "batches-sgd": lambda r: grid(r, "batches-sgd", "SGD", lambda s: f"B {s['batch_size']}"),
    "batches-adamw": lambda r: grid(r, "batches-adamw", "AdamW", lambda s: f"B {s['batch_size']}"),
    "cifar100": lambda r: grid(r, "cifar100", "", lambda s: OPTIMIZERS[s["optimizer"]]),
    **{study: partial(rates, study=study) for study in ("rates-sgd", "rates-adamw")},
    **{
        study: partial(arms_table, study=study)
        for study in (
            *("controls-sgd", "controls-adamw", "vit", "upgrad", "resnet-controls"),
            *("resnet-stabilised", "cnn-stabilised", "batch-norm", "batch-norm-controls"),
        )
    },
    "rivals": rivals,
    "parts": lambda r: parts_table(r.groups("parts")[0], NAMES),
    "second-look": lambda r: second_look_table(r.groups("second-look")[0]),
    "speedrun": lambda r: Budgets(r.runs["speedrun"]).table(NAMES),
    "speedrun-target": lambda r: Budgets(r.runs["speedrun"]).to_target(NAMES),
    "tuned": lambda r: grid(r, "tuned", "", in_words),
    "common-shift": shift_table,
    "tuned-speed": lambda r: speed_table(r.groups("tuned")),
    "tuned-rates": lambda r: rate_table(r.groups("tuned-rates")),
    "speedrun-tuning": lambda r: tuning_table(r.groups("speedrun-tuning"), r.groups("speedrun")),
    "spread": lambda r: spread_table(r.every, NAMES),
    "verdicts": verdicts,
    "claims": claims,
    "commands": commands,
    "machine": machine,
}
PLOTS = {
    "overview-short": "Differences from base in short training, as points with intervals",
    "controls-sgd": "Test accuracy over seconds of training, SGD",
    "controls-adamw": "Test accuracy over seconds of training, AdamW",
    "rates-sgd": "Test accuracy by learning rate, SGD",
    "rates-adamw": "Test accuracy by learning rate, AdamW",
    "long-sgd": "Test accuracy over 40 epochs, SGD",
    "speedrun": "Points above base by the length of the schedule",
    "common-shift": "Points above base by the share of a step that moves all logits alike",
    "parts": "Test accuracy with weights on the head's gradient, the backbone's, or both",
}
