"""A summary as text: for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primum.experiments.statistics import Interval
from primum.experiments.summary import show
from primum.experiments.sweeps.summary import AgainstBase, ArmSummary, SettingSummary

HEADINGS = (
    "",
    "test acc %",
    "vs base",
    "Welch p",
    "Holm p",
    "paired p",
    "could see",
    "test loss",
    "vs base",
    "Holm p",
    "EMA acc %",
    "vs base",
    "Holm p",
    "harmed %",
    "taken %",
    "extra w",
    "time x",
    "steps to",
    "time to",
)
NOTE = (
    "Last epoch, mean ± 95% interval over seeds. vs base: Welch's interval. Holm p: Welch's p, "
    "corrected for all arms of the table; below 0.05 a difference is called seen. could see: the "
    "true difference so many seeds show four times out of five, with that correction and the "
    "spread found. EMA: of the averaged weights. harmed, taken: share of a batch whose loss the "
    "plain step, and the step taken, raises, through the head. steps to, time to: from when on the "
    "test loss was no more than base's is at its end, as a share of base's, by the tests there "
    "were; empty unless every seed got there."
)


def rows(summary: SettingSummary) -> list[list[str]]:
    """The table's cells, headings first; columns that say nothing are left out."""
    lines = [list(HEADINGS), *(_cells(arm) for arm in summary.arms)]
    kept = [
        place
        for place in range(len(HEADINGS))
        if place == 0 or any(line[place] != "–" for line in lines[1:])
    ]
    return [[line[place] for place in kept] for line in lines]


def text_table(summary: SettingSummary) -> str:
    """For a terminal."""
    lines = rows(summary)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(summaries: Sequence[SettingSummary], command: str, title: str = "Comparison") -> str:
    """One page: a table for each setting, what it means, how to get it again."""
    parts = [f"# {title}"]
    for summary in summaries:
        head, *body = rows(summary)
        lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, body)]
        parts += [f"## {summary.title}", "\n".join(lines)]
        parts.append("Settings: " + "; ".join(_told(summary)) + ".")
    parts += [NOTE, f"```sh\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def _told(summary: SettingSummary) -> list[str]:
    return [
        f"{name} {value}" for name, value in summary.settings.items() if value not in (None, False)
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(arm: ArmSummary) -> list[str]:
    return [
        arm.arm,
        show(arm.accuracy, 2),
        *_test(arm.accuracy_test, 2, full=True),
        show(arm.loss, 3),
        *_test(arm.loss_test, 3, full=False),
        show(arm.ema_accuracy, 2),
        *_test(arm.ema_test, 2, full=False),
        _mean(arm.harmed_plain, 1),
        _mean(arm.harmed_taken, 1),
        _mean(arm.extra_weight, 3),
        _mean(arm.time_ratio, 2),
        _mean(arm.steps_to_base, 2),
        _mean(arm.time_to_base, 2),
    ]


def _test(test: AgainstBase | None, digits: int, *, full: bool) -> list[str]:
    if test is None:
        return ["–"] * (5 if full else 2)
    change = test.change
    welch = f"{change.welch.mean:+.{digits}f}"
    if not math.isnan(change.welch.half_width):
        welch += f" ± {change.welch.half_width:.{digits}f}"
    if not full:
        return [welch, p_value(test.adjusted_p)]
    could = "–" if math.isnan(test.smallest) else f"{test.smallest:.{digits}f}"
    return [
        welch,
        p_value(change.welch_p),
        p_value(test.adjusted_p),
        p_value(change.paired_p),
        could,
    ]


def p_value(value: float) -> str:
    """Three digits; a dash for what is not a number."""
    if math.isnan(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _mean(value: Interval | None, digits: int) -> str:
    return "–" if value is None else f"{value.mean:.{digits}f}"
