"""The page of any runs: verdict, table, pictures, settings, how to do it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from primum.experiments.report import parts, words
from primum.experiments.report.groups import (
    Group,
    against_others,
    columns,
    finished,
    group_runs,
    moments_by_label,
    over_seeds,
)
from primum.experiments.report.pictures import (
    batch_picture,
    network_pictures,
    protected_picture,
    training_pictures,
)
from primum.experiments.runs import RunRecord
from primum.experiments.statistics import Difference
from primum.experiments.summary import show
from primum.experiments.verdict import RULE as DEMO_RULE

READING = (
    "Figures are means over seeds with 95% Student-t intervals, from the last epoch, never the "
    "best. A sample is harmed when a step raises its loss, to first order; where nothing else is "
    "said, through the head alone, as a mean over all steps of a run."
)
LOOKS = {
    "reor": ("harm removed, %", 100),
    "reor_real": ("really removed, %", 100),
    "harmed": ("harmed, %", 100),
    "harmed_real": ("really harmed, %", 100),
    "sign_right": ("sign told rightly, %", 100),
    "mean_extra_weight": ("mean extra weight", 1),
}


def render_runs(
    records: Sequence[RunRecord],
    *,
    title: str = "What did the steps do?",
    introduction: Sequence[str] = (),
    arms: Mapping[str, str] | None = None,
    verdicts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        records: Runs of any kind; those with the same name and settings are compared.
        title: Heading.
        introduction: Paragraphs below it.
        arms: What the arms are.
        verdicts: Sentences by name of the runs, instead of our own.
        notes: Paragraphs below the settings.
    """
    groups = group_runs(records)
    rule = DEMO_RULE if verdicts else words.RULE
    rule = parts.paragraph(rule, "note") if any(group.focus for group in groups) else ""
    told = "".join(_verdict(group, verdicts or {}) for group in groups)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(parts.paragraph(text, "soft") for text in introduction),
        f'<section class="verdict"><h2>Verdict</h2>{told}{rule}</section>',
        parts.definitions(arms) if arms else "",
        parts.paragraph(READING, "note"),
        *(_section(group) for group in groups),
        _settings(groups, notes),
    ]
    return parts.document(title, "\n".join(part for part in body if part))


def _verdict(group: Group, verdicts: Mapping[str, str]) -> str:
    sentence = verdicts.get(group.title) or words.headline(group)
    return f"<p><strong>{escape(group.title)}.</strong> {escape(sentence)}</p>"


def _section(group: Group) -> str:
    drawn = [
        *training_pictures(group),
        *batch_picture(group),
        *network_pictures(group),
        *protected_picture(group),
    ]
    return "".join(
        (
            f"<h2>{escape(group.title)}</h2>",
            _table(group),
            parts.bullets(words.details(group)),
            parts.pictures(drawn),
            _differences(group),
            _looks(group),
        )
    )


def _table(group: Group) -> str:
    """One row per arm."""
    shown = columns(group)
    rows = [
        (arm, [arm, *(show(over_seeds(runs, c.of), c.digits) for c in shown)])
        for arm, runs in group.arms.items()
        if finished(runs)
    ]
    head = ["", *(column.heading for column in shown)]
    return parts.table(head, rows, label=f"{group.title}: figures by arm") if rows and shown else ""


def _differences(group: Group) -> str:
    """The arm in focus against each other arm, both intervals and p-values."""
    rows = [
        ("", [f"minus {c.other}", *_difference(c.accuracy, 2), *_difference(c.loss, 4)])
        for c in against_others(group)
        if c.seeds > 1
    ]
    if not rows:
        return ""
    head = [group.focus or ""]
    for figure in ("accuracy", "loss"):
        head += [f"{figure}, paired", "p", f"{figure}, Welch", "p", "Holm p"]
    return "<h3>Differences</h3>" + parts.table(head, rows, label=f"{group.title}: differences")


def _difference(change: Difference | None, digits: int) -> list[str]:
    if change is None:
        return ["–"] * 5
    return [
        show(change.paired, digits),
        f"{change.paired_p:.2g}",
        show(change.welch, digits),
        f"{change.welch_p:.2g}",
        "–" if change.adjusted_p is None else f"{change.adjusted_p:.2g}",
    ]


def _looks(group: Group) -> str:
    """The whole network, one table per moment; all but the last folded away."""
    looked = moments_by_label(group)
    tables = []
    for place, (label, moments) in enumerate(looked.items()):
        names = moments[0]["table"]["weights"]
        rows = [
            ("primum" if name == "head" else "", [name, *_cells(moments, row)])
            for row, name in enumerate(names)
        ]
        head = ["weights", *(heading for heading, _ in LOOKS.values())]
        count = f", mean of {len(moments)} batches" if len(moments) > 1 else ""
        title = f"Whole network at {label}{count}"
        opened = " open" if place == len(looked) - 1 else ""
        tables.append(
            f"<details{opened}><summary>{escape(title)}</summary>"
            f"{parts.table(head, rows, label=title)}</details>"
        )
    return "".join(tables)


def _cells(moments: Sequence[Mapping[str, Any]], row: int) -> list[str]:
    cells = []
    for name, (_, scale) in LOOKS.items():
        values = [moment["table"][name][row] for moment in moments]
        known = [value for value in values if value is not None]
        digits = 0 if scale == 100 else 2
        cells.append(f"{scale * fmean(known):.{digits}f}" if known else "–")
    return cells


def _settings(groups: Sequence[Group], notes: Sequence[str]) -> str:
    runs = [run for group in groups for run in group.runs]
    made: dict[str, str] = {"seeds": ", ".join(str(s) for s in sorted({r.seed for r in runs}))}
    for run in runs:
        for key, value in run.environment.items():
            known = made.setdefault(key, value)
            if value not in known.split("; "):
                made[key] = f"{known}; {value}"
    seconds = sum(run.seconds or 0.0 for run in runs)
    if seconds:
        made["time of all runs"] = f"{seconds:.0f} s"
    settings = {group.title: _plain(group.settings) for group in groups if group.settings}
    typed = parts.commands([run.command for run in runs])
    return (
        (f"<h2>Settings</h2>{parts.definitions(settings)}" if settings else "")
        + "".join(parts.paragraph(note, "note") for note in notes)
        + f"<h2>Made with</h2>{parts.definitions(made)}"
        + (f"<h2>Do it again</h2>{typed}" if typed else "")
    )


def _plain(settings: Mapping[str, Any]) -> str:
    parts = []
    for key, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
        if value is not None:
            parts.append(f"{key.replace('_', ' ')}: {text}")
    return "; ".join(parts)
