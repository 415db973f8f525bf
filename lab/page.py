"""The report: one self-contained HTML page for any runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Any

import jinja2

from lab.arms import ARMS
from lab.formatting import p_value, show
from lab.plots import group_plots
from lab.runs import RunRecord, environments
from lab.statistics import RULE, Difference
from lab.tables import METRICS, Group, group_runs, moments_by_label, of_weighting
from lab.verdicts import details, headline

LOOKS = {
    "reor": ("harm removed, %", 100),
    "reor_real": ("really removed, %", 100),
    "harmed": ("harmed, %", 100),
    "harmed_real": ("really harmed, %", 100),
    "sign_right": ("sign right, %", 100),
    "mean_extra_weight": ("mean extra weight", 1),
}


def render(
    records: Sequence[RunRecord],
    *,
    title: str = "What did the steps do?",
    introduction: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """The report as HTML.

    Args:
        records: Runs of any kind; those with the same name and settings are compared.
        title: Title of the page.
        introduction: Paragraphs below the title.
        notes: Paragraphs below the settings.
    """
    groups = group_runs(records)
    names = dict.fromkeys(run.arm for run in records)
    folder = files("lab")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    page: str = template.render(
        title=title,
        css=folder.joinpath("page.css").read_text(encoding="utf-8"),
        introduction=introduction,
        rule=RULE if any(group.focus for group in groups) else "",
        arms={arm: ARMS[arm].about for arm in names if arm in ARMS and len(names) > 1},
        groups=[_group(group) for group in groups],
        settings={group.title: _plain(group.settings) for group in groups if group.settings},
        notes=notes,
        made=_made(records),
        commands=list(dict.fromkeys(run.command for run in records if run.command)),
    )
    return page.lstrip()


def _group(group: Group) -> dict[str, Any]:
    """Template values for a group."""
    return {
        "title": group.title,
        "headline": headline(group),
        "details": details(group),
        "metrics": _metrics(group),
        "differences": _differences(group),
        "plots": list(group_plots(group)),
        "looks": _looks(group),
    }


def _metrics(group: Group) -> dict[str, Any] | None:
    """One row per arm, with the metrics that at least one arm has."""
    arms = [arm for arm in group.arms if arm in group.table.index]
    shown = [m for m in METRICS if any(group.interval(arm, m) is not None for arm in arms)]
    if not arms or not shown:
        return None
    rows = [
        (arm, [show(group.interval(arm, m), min(METRICS[m].digits, 3)) for m in shown])
        for arm in arms
    ]
    return {"head": ["", *(group.about(m).heading for m in shown)], "rows": rows}


def _differences(group: Group) -> dict[str, Any] | None:
    """The tests behind the verdict: each arm against base, the arm in focus against the rest."""
    rows: list[tuple[str, list[str]]] = []
    digits = {"loss": 4} if group.judged_by == "loss" else {"accuracy": 2, "loss": 4}
    base = {metric: group.against_base(metric) for metric in digits}
    rest = {metric: group.focus_against(metric) for metric in digits}
    for tests, label in ((base, "{} - base"), (rest, f"{group.focus} - {{}}")):
        for arm in group.arms:
            found = {metric: tests[metric].get(arm) for metric in digits}
            if any(test is not None and test.interval.count > 1 for test in found.values()):
                cells = [_test(test, digits[metric]) for metric, test in found.items()]
                rows.append((label.format(arm), [cell for some in cells for cell in some]))
    if not rows:
        return None
    head = [""]
    for metric in digits:
        head += [metric, "p", "Holm p", "could see"]
    return {"head": head, "rows": rows}


def _test(test: Difference | None, digits: int) -> list[str]:
    if test is None:
        return ["–"] * 4
    return [
        show(test.interval, digits, sign="+"),
        p_value(test.p),
        p_value(test.adjusted_p),
        f"{test.smallest:.{digits}f}",
    ]


def _looks(group: Group) -> list[dict[str, Any]]:
    """One table per whole-network measurement; the last one is shown expanded."""
    looked = moments_by_label(group)
    tables = []
    for place, (label, moments) in enumerate(looked.items()):
        count = f", mean of {len(moments)} batches" if len(moments) > 1 else ""
        rows = [
            (name, [look_cell(moments, column, name) for column in LOOKS])
            for name in moments[0]["table"]["weights"]
        ]
        tables.append(
            {
                "title": f"Whole network at {label}{count}",
                "open": place == len(looked) - 1,
                "head": ["weights", *(heading for heading, _ in LOOKS.values())],
                "rows": rows,
            }
        )
    return tables


def look_cell(moments: Sequence[Mapping[str, Any]], column: str, weighting: str) -> str:
    """The mean of a column of whole-network measurements for one weighting; a dash for none."""
    known = of_weighting(moments, column, weighting)
    scale = LOOKS[column][1]
    return f"{scale * fmean(known):.{0 if scale == 100 else 2}f}" if known else "–"


def _made(records: Sequence[RunRecord]) -> dict[str, str]:
    """Seeds, versions and hardware; values that differ between runs are listed."""
    made = {"seeds": ", ".join(str(seed) for seed in sorted({run.seed for run in records}))}
    made |= {key: "; ".join(values) for key, values in environments(records).items()}
    seconds = sum(run.seconds or 0.0 for run in records)
    return made | ({"training time of all runs": f"{seconds:.0f} s"} if seconds else {})


def _plain(settings: Mapping[str, Any]) -> str:
    parts = []
    for key, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
        if value is not None:
            parts.append(f"{key.replace('_', ' ')}: {text}")
    return "; ".join(parts)
