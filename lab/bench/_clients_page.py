"""Tables of docs/clients.md, from the results of the clients study."""

from __future__ import annotations

import re
from statistics import fmean, stdev
from typing import Any

from lab.bench._common import describe
from lab.text_tables import markdown_table

Row = dict[str, Any]


def changes(row: Row) -> list[float]:
    """Relative change of each seed's metric; positive is better."""
    sign = 1 if row["more_is_better"] else -1
    pairs = zip(row["plain"], row["with"], strict=True)
    return [sign * (with_it - plain) / abs(plain) for plain, with_it in pairs]


def wins(row: Row) -> int:
    return sum(change > 0 for change in changes(row))


def losses(row: Row) -> int:
    return sum(change < 0 for change in changes(row))


def change_cell(row: Row) -> str:
    """Mean and standard deviation over seeds, in percent; positive is better."""
    values = [100 * each for each in changes(row)]
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):+.1f}{spread}"


def figures(values: list[float]) -> str:
    mean = fmean(values)
    return f"{mean:.3f}" if abs(mean) < 10 else f"{mean:.1f}"


def columns() -> list[str]:
    return ["script", "added", "figure", "plain", "with it", "better by, %", "seeds better",
            "harmed, %", "time x"]  # fmt: skip


def row_cells(row: Row) -> list[str]:
    return [
        f"{row['script']} ({row['pattern']})",
        row["added"] if "`" in row["added"] else f"`{row['added']}`",
        row["figure"],
        figures(row["plain"]),
        figures(row["with"]),
        change_cell(row),
        f"{wins(row)} of {len(row['plain'])}",
        "–" if row["harmed"] is None else f"{100 * row['harmed']:.0f}",
        f"{row['with_ms'] / row['plain_ms']:.2f}",
    ]


def main_table(content: Row) -> str:
    return markdown_table(columns(), [row_cells(row) for row in content["rows"]])


def _kind(row: Row) -> str:
    count = len(row["plain"])
    if wins(row) == count:
        return "better in every seed"
    if losses(row) == count:
        return "worse in every seed"
    if wins(row) == losses(row) == 0:
        return "the same, bit for bit"
    return "better in some seeds, worse in others"


def summary(content: Row) -> str:
    """Rows by outcome: better or worse in every seed, mixed, the same."""
    kinds = (
        "better in every seed",
        "better in some seeds, worse in others",
        "worse in every seed",
        "the same, bit for bit",
    )
    rows = []
    for kind in kinds:
        found = [row for row in content["rows"] if _kind(row) == kind]
        names = [f"{row['script']}: `{_short(row)}` ({change_cell(row)}%)" for row in found]
        rows.append([kind, str(len(found)), "; ".join(names) or "–"])
    return markdown_table(["", "rows", "which"], rows)


def _short(row: Row) -> str:
    """The settings in the added code."""
    if "paused" in row["added"]:
        return "paused"
    inside = row["added"].partition("(")[2]
    named = re.findall(r"\b(?!callbacks)\w+=[^,()\[\]]+", inside)
    return ", ".join(named) or "default"


def others(content: Row) -> str:
    """Effect on another network that is trained through the head."""
    rows = [
        [
            row["script"],
            row["added"] if "`" in row["added"] else f"`{row['added']}`",
            f"{100 * row['extra']['other_network_off_by']:.0f}%",
            str(row["discarded"]),
        ]
        for row in content["rows"]
        if "other_network_off_by" in row["extra"]
    ]
    head = ["script", "added", "the other network's gradient is off by", "discarded passes"]
    return markdown_table(head, rows)


def spoken(content: Row) -> str:
    """All warnings of primum in these runs, with the scripts that caused them."""
    rows: dict[str, list[str]] = {}
    for row in content["rows"]:
        for text in row["warnings"]:
            text = re.sub(r"\b\d+(\.\d+)?(?=%)|(?<=\(mean )[\d.e-]+", "N", text)
            text = re.sub(r"'[\w.]+'", "'…'", text)
            name = f"{row['script']} (`{_short(row)}`)"
            if name not in rows.setdefault(text, []):
                rows[text].append(name)
    cells = [[f"`` {text} ``", "; ".join(names)] for text, names in rows.items()]
    return markdown_table(["warning", "in"], cells) if cells else "None."


def machine(content: Row) -> str:
    """Machine, date and duration; scripts that were run again later; the note."""
    seconds = content["environment"]["seconds"]
    parts = [f"{describe(content['environment'])}; {seconds / 60:.0f} minutes."]
    for each in content["again"]:
        names = ", ".join(f"“{name}”" for name in each["scripts"])
        parts.append(f"Run again afterwards: {names}; {describe(each['environment'])}.")
    if "note" in content:
        parts.append(f"**{content['note']}**")
    return "\n\n".join(parts)


def tables(content: Row) -> dict[str, str]:
    """The page's tables by name."""
    return {
        "scripts": main_table(content),
        "summary": summary(content),
        "others": others(content),
        "warnings": spoken(content),
        "machine": machine(content),
    }
