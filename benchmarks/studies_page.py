"""Tables and pictures of docs/results.md and docs/claims.md, from results.

    python benchmarks/studies_page.py       # writes both; --check only compares

Both stand between `<!-- table NAME -->` and `<!-- end -->`; the words around them are ours.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _common import markdown_table
from _study_figures import pictures
from studies import RESULTS, STUDIES, named

from primum.experiments.report.groups import Group, accuracy, group_runs
from primum.experiments.runs import RunRecord
from primum.experiments.schedules import scaled_lr
from primum.experiments.statistics import (
    Difference,
    Interval,
    difference,
    holm,
    interval,
    smallest_effect,
)
from primum.experiments.sweeps.reproduce.cli import NAMES
from primum.experiments.sweeps.settings import OPTIMIZERS, RATES
from primum.experiments.sweeps.store import Store
from primum.experiments.sweeps.summary import ArmSummary, SettingSummary, summarise
from primum.experiments.sweeps.table import p_value

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "results.md", DOCS / "claims.md")
IMAGES = DOCS / "images"
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
MAIN = ("primum", "primum@radius=0.4", "paper")
RADII = {
    "base": "0",
    "primum@radius=0.1": "0.1",
    "primum": "0.2",
    "primum@radius=0.4": "0.4",
    "primum@radius=0.8": "0.8",
}
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Results:
    """Finished runs of all studies."""

    def __init__(self, folder: Path) -> None:
        store = Store(folder)
        self.folder = folder
        self.records: dict[str, list[RunRecord]] = {
            name: study.found(store) for name, study in STUDIES.items()
        }

    def of(self, study: str) -> list[RunRecord]:
        """Of a study."""
        return self.records[study]

    def summaries(self, study: str) -> list[SettingSummary]:
        """Of a study, one for each setting."""
        return summarise(self.of(study))

    def settings(self) -> list[Group]:
        """All settings at their own learning rate, each once, with all arms and seeds."""
        every = {
            run.arm_settings["key"]: run
            for name, runs in self.records.items()
            for run in runs
            if not name.startswith("rates")
        }
        return group_runs(list(every.values()))


def pm(found: Interval | None, digits: int = 1, sign: str = "") -> str:
    """Mean and half-width."""
    if found is None:
        return "–"
    width = "" if math.isnan(found.half_width) else f" ± {found.half_width:.{digits}f}"
    return f"{found.mean:{sign}.{digits}f}{width}"


def percent(run: RunRecord) -> float:
    """Accuracy of the last epoch; every finished run has one."""
    found = accuracy(run)
    assert found is not None
    return found


def against(mine: Sequence[RunRecord], other: Sequence[RunRecord]) -> Difference | None:
    """Accuracy in points, over the seeds both have."""
    first, second = ({run.seed: percent(run) for run in runs} for runs in (mine, other))
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    return difference([first[seed] for seed in common], [second[seed] for seed in common])


def told(settings: dict[str, Any]) -> str:
    """A setting in a few words."""
    words = [
        settings["model"],
        DATA[settings["data"]],
        OPTIMIZERS[settings["optimizer"]],
        f"B {settings['batch_size']}",
        f"{settings['train_size'] // 1000}k images",
        f"{settings['epochs']} epochs",
    ]
    usual = scaled_lr(RATES[settings["optimizer"]], settings["batch_size"])
    if not math.isclose(settings["lr"], usual):
        words.append(f"lr {settings['lr']:g}")
    if settings["label_noise"]:
        words.append(f"{settings['label_noise']:.0%} wrong labels")
    return ", ".join(words)


def overview_rows(results: Results) -> list[tuple[str, Group, dict[str, Difference]]]:
    """Every setting with its differences from base, by arm."""
    found = []
    for group in results.settings():
        base = group.arms.get("base", [])
        changes = {
            arm: change
            for arm in MAIN
            if (change := against(group.arms.get(arm, []), base)) is not None
        }
        if "primum" in changes:
            found.append((told(group.settings), group, changes))
    return found


def overview(results: Results) -> str:
    """Every setting: base, and what each recipe adds; one family of tests for each of them."""
    lines = overview_rows(results)
    adjusted = {arm: iter(holm([c[arm].welch_p for _, _, c in lines if arm in c])) for arm in MAIN}
    rows = []
    for name, group, changes in lines:
        cells = [name, pm(_mean(group.arms["base"]))]
        for arm in MAIN:
            if arm not in changes:
                cells.append("–")
                continue
            change = changes[arm]
            seen = next(adjusted[arm]) < 0.05
            text = f"{pm(change.welch, sign='+')} ({change.welch.count})"
            cells.append(f"**{text}**" if seen else text)
        rows.append(cells)
    return markdown_table(
        ["setting", "base, %", *(f"{each} - base" for each in map(named, MAIN))], rows
    )


def counts(results: Results) -> str:
    """How often each recipe was seen to be better, worse, or neither, over all settings."""
    lines = overview_rows(results)
    rows = []
    for arm in MAIN:
        changes = [c[arm] for _, _, c in lines if arm in c]
        seen = [p < 0.05 for p in holm([change.welch_p for change in changes])]
        ups = [change.welch.mean > 0 for change in changes]
        better = sum(s and up for s, up in zip(seen, ups, strict=True))
        worse = sum(s and not up for s, up in zip(seen, ups, strict=True))
        rows.append(
            [
                named(arm),
                str(len(changes)),
                str(better),
                str(len(changes) - better - worse),
                str(worse),
                f"{sum(ups)} of {len(ups)}",
            ]
        )
    head = ["", "settings", "better", "no difference seen", "worse", "mean above base"]
    return markdown_table(head, rows)


def arms_table(results: Results, study: str) -> str:
    """A study of one or few settings, arm by arm."""
    parts = []
    for summary, group in zip(results.summaries(study), group_runs(results.of(study)), strict=True):
        rows = [_arm_row(arm) for arm in summary.arms]
        others = {
            arm: change
            for arm in group.arms
            if arm not in ("primum", "base")
            and (change := against(group.arms.get("primum", []), group.arms[arm])) is not None
        }
        adjusted = holm([change.welch_p for change in others.values()])
        for row, arm in zip(rows, summary.arms, strict=True):
            change = others.get(arm.arm)
            cell = "–"
            if change is not None:
                p = adjusted[list(others).index(arm.arm)]
                cell = f"{pm(change.welch, sign='+')} ({p_value(p)})"
            row.insert(4, cell)
        head = ["arm", "seeds", "accuracy, %", "- base (Holm p)", "primum - arm (Holm p)",
                "test loss", "harmed, %", "extra", "time x", "steps to"]  # fmt: skip
        title = f"{told(summary.settings)}:\n\n" if len(results.summaries(study)) > 1 else ""
        parts.append(title + markdown_table(head, rows))
    return "\n\n".join(parts)


def _arm_row(arm: ArmSummary) -> list[str]:
    test = arm.accuracy_test
    change = "–"
    if test is not None:
        change = f"{pm(test.change.welch, sign='+')} ({p_value(test.adjusted_p)})"
    return [
        named(arm.arm),
        str(len(arm.seeds)),
        pm(arm.accuracy),
        change,
        pm(arm.loss, 3),
        *(
            "–" if value is None else f"{value.mean:.{digits}f}".replace("-0.00", "0.00")
            for value, digits in (
                (arm.harmed_taken, 0),
                (arm.extra_weight, 2),
                (arm.time_ratio, 2),
            )
        ),
        pm(arm.steps_to_base, 2),
    ]


def grid(results: Results, study: str, heading: str, label: Callable[[dict[str, Any]], str]) -> str:
    """A study with several settings: one line for each; all differences are one family."""
    groups = group_runs(results.of(study))
    arms = [arm for arm in MAIN if any(arm in group.arms for group in groups)]
    cells = {
        (place, arm): (group.arms[arm], group.arms["base"])
        for place, group in enumerate(groups)
        for arm in arms
        if arm in group.arms
    }
    changes = {cell: change for cell, both in cells.items() if (change := against(*both))}
    adjusted = dict(zip(changes, holm([c.welch_p for c in changes.values()]), strict=True))
    rows = []
    for place, group in enumerate(groups):
        base = group.arms["base"]
        row = [label(group.settings), str(len(base)), pm(_mean(base))]
        for arm in arms:
            cell = place, arm
            row.append(
                f"{pm(changes[cell].welch, sign='+')} ({p_value(adjusted[cell])})"
                if cell in changes
                else "–"
            )
        missed = [
            smallest_effect(*([percent(r) for r in runs] for runs in cells[place, arm]),
                            family=len(changes))
            for arm in arms if (place, arm) in changes
        ]  # fmt: skip
        row.append(f"{max(missed):.1f}" if missed else "–")
        rows.append(row)
    head = [heading, "seeds", "base, %", *(f"{named(arm)} - base (Holm p)" for arm in arms)]
    return markdown_table([*head, "could see"], rows)


def radius(results: Results) -> str:
    """Accuracy and mean extra weight by radius, for each optimizer."""
    rows = []
    summaries = {OPTIMIZERS[s.settings["optimizer"]]: s for s in results.summaries("radius")}
    for arm in RADII:
        row = [RADII[arm]]
        for summary in summaries.values():
            found = next((each for each in summary.arms if each.arm == arm), None)
            cells = ["–"] * 4
            if found is not None:
                harmed, extra = found.harmed_taken, found.extra_weight
                cells = [
                    pm(found.accuracy),
                    pm(found.loss, 3),
                    "–" if harmed is None else f"{harmed.mean:.0f}",
                    "–" if extra is None else f"{extra.mean:.2f}",
                ]
            row += cells
        rows.append(row)
    head = ["radius"]
    for name in summaries:
        head += [f"{name}: accuracy, %", "test loss", "harmed, %", "extra"]
    return markdown_table(head, rows)


def rates(results: Results, study: str) -> str:
    """Accuracy by learning rate, and best against best; a best at the edge is marked."""
    groups = sorted(group_runs(results.of(study)), key=lambda group: group.settings["lr"])
    arms = ["base", *(arm for arm in MAIN if any(arm in group.arms for group in groups))]
    rows = [
        [f"{group.settings['lr']:g}",
         *(pm(_mean(group.arms[arm])) if arm in group.arms else "–" for arm in arms)]
        for group in groups
    ]  # fmt: skip
    best = {
        arm: max(
            (place for place, group in enumerate(groups) if arm in group.arms),
            key=lambda place, arm=arm: _mean(groups[place].arms[arm]).mean,
        )
        for arm in arms
    }
    ends = {arm: groups[place].arms[arm] for arm, place in best.items()}
    edge = (0, len(groups) - 1)
    rows.append(
        ["best", *(f"{pm(_mean(ends[arm]))} at {groups[place].settings['lr']:g}"
                   + (" (edge)" if place in edge else "") for arm, place in best.items())]
    )  # fmt: skip
    changes = [against(ends[arm], ends["base"]) for arm in arms[1:]]
    rows.append(["best - best of base", "–", *(pm(c and c.welch, sign="+") for c in changes)])
    return markdown_table(["learning rate", *(named(arm) for arm in arms)], rows)


def _mean(runs: Sequence[RunRecord]) -> Interval:
    return interval([percent(run) for run in runs])


def long(results: Results, study: str) -> str:
    """A long schedule: last epoch, training and test loss, and where base was passed."""
    (summary,) = results.summaries(study)
    (group,) = group_runs(results.of(study))
    rows = []
    for arm in summary.arms:
        runs = group.arms[arm.arm]
        row = _arm_row(arm)[:4]
        test = arm.accuracy_test
        row.append("–" if test is None else f"{test.smallest:.1f}")
        row.append(pm(arm.steps_to_base, 2))
        losses = [run.final["train_loss"] for run in runs]
        row.append(pm(interval([each for each in losses if each is not None]), 3))
        row += [pm(arm.loss, 3)]
        for epoch in (5, 10, 20, 40):
            place = runs[0].curves["epoch"].index(epoch)
            row.append(f"{100 * fmean(r.curves['test_accuracy'][place] for r in runs):.1f}")
        rows.append(row)
    head = ["arm", "seeds", "accuracy, %", "- base (Holm p)", "could see", "steps to",
            "train loss, last 5 epochs", "test loss", "epoch 5", "10", "20", "40"]  # fmt: skip
    return markdown_table(head, rows)


def outcomes(results: Results) -> list[dict[str, Any]]:
    """What `primum reproduce` wrote at small, in the order of its list."""
    paths = (results.folder / "reproduce" / "small" / f"{name}.json" for name in NAMES)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def verdicts(results: Results) -> str:
    """Each experiment in a line."""
    rows = [[each["title"], each["verdict"]] for each in outcomes(results)]
    return markdown_table(["part of the paper", "at `small`"], rows)


def claims(results: Results) -> str:
    """Claim by claim."""
    parts = []
    for outcome in outcomes(results):
        rows = [
            [finding[column] for column in ("claim", "paper", "ours", "status", "note")]
            for finding in outcome["findings"]
        ]
        table = markdown_table(["claim", "the paper", "here", "", ""], rows)
        parts += [f"## {outcome['title']}", f"**{outcome['verdict']}**", *outcome["notes"], table]
        parts.append(f"```sh\n{outcome['command']}\n```")
    return "\n\n".join(parts)


def machine(results: Results) -> str:
    """Versions and hardware of all runs."""
    found: dict[str, dict[str, None]] = {}
    for runs in results.records.values():
        for run in runs:
            for name, value in run.environment.items():
                found.setdefault(name, {})[value] = None
    return markdown_table(["", ""], [[name, ", ".join(values)] for name, values in found.items()])


def commands(results: Results) -> str:
    """What each study is, and how it was made."""
    parts = []
    for name, study in STUDIES.items():
        if results.of(name):
            made, planned = len(results.of(name)), len(study.runs())
            rest = "" if made == planned else f" of {planned}"
            parts.append(f"* `{name}`, {made}{rest} runs: `{study.command}`")
    return "\n".join(parts)


MAKERS: dict[str, Callable[[Results], str]] = {
    "overview": overview,
    "counts": counts,
    "controls-sgd": lambda r: arms_table(r, "controls-sgd"),
    "controls-adamw": lambda r: arms_table(r, "controls-adamw"),
    "rates-sgd": lambda r: rates(r, "rates-sgd"),
    "rates-adamw": lambda r: rates(r, "rates-adamw"),
    "long-sgd": lambda r: long(r, "long-sgd"),
    "radius": radius,
    "noise": lambda r: grid(r, "noise", "wrong labels", lambda s: f"{s['label_noise']:.0%}"),
    "batches-sgd": lambda r: grid(r, "batches-sgd", "SGD", lambda s: f"B {s['batch_size']}"),
    "batches-adamw": lambda r: grid(r, "batches-adamw", "AdamW", lambda s: f"B {s['batch_size']}"),
    "cifar100": lambda r: grid(r, "cifar100", "", lambda s: OPTIMIZERS[s["optimizer"]]),
    "vit": lambda r: arms_table(r, "vit"),
    "resnet": lambda r: arms_table(r, "resnet"),
    "upgrad": lambda r: arms_table(r, "upgrad"),
    "verdicts": verdicts,
    "claims": claims,
    "commands": commands,
    "machine": machine,
}


PICTURES = {
    "overview": "Differences from base for all settings, as points with intervals",
    "controls-sgd": "Test accuracy over seconds of training, SGD",
    "controls-adamw": "Test accuracy over seconds of training, AdamW",
    "rates-sgd": "Test accuracy by learning rate, SGD",
    "rates-adamw": "Test accuracy by learning rate, AdamW",
    "long-sgd": "Test accuracy over 40 epochs, SGD",
}


def filled(page: str, results: Results) -> str:
    """The page with the tables of the results."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        there = name not in STUDIES or results.of(name)
        made = MAKERS[name](results) if there else "Not run yet."
        if there and name in PICTURES:
            made += f"\n\n![{PICTURES[name]}](images/results-{name}.png)"
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return MARK.sub(fill, page)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make tables and pictures of the results pages.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, metavar="FILE")
    parser.add_argument("--images", type=Path, default=IMAGES, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    arguments = parser.parse_args(argv)
    results = Results(arguments.results)
    before = [page.read_text(encoding="utf-8") for page in arguments.pages]
    after = [filled(text, results) for text in before]
    if arguments.check:
        return int(before != after)
    for page, text in zip(arguments.pages, after, strict=True):
        page.write_text(text, encoding="utf-8")
    for name, figure in pictures(results, overview_rows(results)).items():
        path = arguments.images / f"results-{name}.png"
        figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
