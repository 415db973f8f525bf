"""Results as text: intervals, differences, one row per arm, a summary page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.statistics import RULE, Difference, Interval
from lab.tables import METRICS, TESTED, Group
from lab.text_tables import markdown_table

NOTE = (
    f"End of training, mean ± 95% interval over seeds. {RULE} EMA: averaged weights. harmed, "
    "taken: share of a batch (of text: of its tokens) whose loss the plain step, and the step "
    "taken, raises, measured in the head. "
    "steps to, time to: first evaluation from which test loss stays at or below base's final loss, "
    "as a share of base's total; empty unless every seed got there."
)


def show(value: Interval | None, digits: int, sign: str = "") -> str:
    """`mean ± half-width`; only the mean for a single value; a dash for None."""
    if value is None:
        return "–"
    width = "" if math.isnan(value.half_width) else f" ± {value.half_width:.{digits}f}"
    return f"{value.mean:{sign}.{digits}f}{width}"


def show_mean(value: Interval | None, digits: int) -> str:
    """The mean; a dash for None."""
    return "–" if value is None else f"{value.mean:.{digits}f}".replace("-0.00", "0.00")


def p_value(value: float) -> str:
    """Three digits; a dash for NaN."""
    if math.isnan(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def with_p(test: Difference | None, digits: int = 1) -> str:
    """Difference, interval and corrected p-value in one cell."""
    if test is None:
        return "–"
    return f"{show(test.interval, digits, sign='+')} ({p_value(test.adjusted_p)})"


def arm_rows(group: Group) -> list[list[str]]:
    """Header and one row per arm; columns without numbers are left out."""
    columns: list[list[str]] = [["", *group.arms]]
    for name in METRICS:
        metric = group.about(name)
        found = [group.interval(arm, name) for arm in group.arms]
        if name not in TESTED:
            columns.append([metric.short, *(show_mean(each, metric.digits) for each in found)])
            continue
        against = group.against_base(name)
        tests = [against.get(arm) for arm in group.arms]
        columns.append([metric.short, *(show(each, metric.digits) for each in found)])
        changes = [test and show(test.interval, metric.digits, sign="+") for test in tests]
        columns.append(["vs base", *(change or "–" for change in changes)])
        columns.append(["Holm p", *(p_value(test.adjusted_p) if test else "–" for test in tests)])
        if name == group.judged_by:
            columns.append(["could see", *(_could_see(test, metric.digits) for test in tests)])
    kept = [c for c in columns if c is columns[0] or any(cell != "–" for cell in c[1:])]
    return [list(row) for row in zip(*kept, strict=True)]


def _could_see(test: Difference | None, digits: int) -> str:
    return "–" if test is None or math.isnan(test.smallest) else f"{test.smallest:.{digits}f}"


def summary_page(groups: Sequence[Group], command: str, title: str) -> str:
    """A Markdown page with a table per group, an explanation, and the command."""
    parts = [f"# {title}"]
    for group in groups:
        head, *body = arm_rows(group)
        parts += [f"## {group.title}", markdown_table(head, body)]
        listed = [f"{k} {v}" for k, v in group.settings.items() if v not in (None, False)]
        parts.append(f"Settings: {'; '.join(listed)}.")
    parts += [NOTE, f"```sh\n{command}\n```"]
    return "\n\n".join(parts) + "\n"
