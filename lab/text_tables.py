"""Tables as text: for a terminal, as Markdown, and in a page.

In a page, tables are placed between `<!-- table NAME -->` and `<!-- end -->`; the other text is
handwritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_page(text: str, table: Callable[[str], str]) -> str:
    """A page with its tables replaced, by their names."""
    return MARK.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)


def text_table(rows: Sequence[Sequence[str]], *, left: int | None = 1, rule: bool = False) -> str:
    """A table with aligned columns for a terminal; the first row is the header.

    Args:
        rows: Cells.
        left: Number of left-aligned columns; None: those that do not hold numbers.
        rule: Whether to draw a line below the header.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    first = rows[1] if len(rows) > 1 else rows[0]
    to_left = [not is_number(c) if left is None else n < left for n, c in enumerate(first)]
    lines = [
        "  ".join(
            cell.ljust(width) if on_left else cell.rjust(width)
            for cell, width, on_left in zip(row, widths, to_left, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]] if rule else lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns whose first cell is a number are right-aligned."""
    rule = ["---:" if rows and is_number(rows[0][i]) else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def is_number(cell: str) -> bool:
    """Whether a cell is a number: 12, +3.5, >1.0, 2.0x."""
    return cell.lstrip("+->").replace(".", "", 1).replace("x", "", 1).isdigit()
