"""The parts of a page, as text that is safe to put into HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple


class Picture(NamedTuple):
    """SVG for inside the page, and what to say below it."""

    svg: str
    caption: str


def document(title: str, body: str) -> str:
    """A whole page."""
    css = files("primum.experiments").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def paragraph(text: str, kind: str = "") -> str:
    """Some words; `kind` is `soft` or `note`."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(sentences: Sequence[str]) -> str:
    """A list, or nothing."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def pictures(drawn: Sequence[Picture]) -> str:
    """Side by side where there is room."""
    shown = "".join(
        f"<figure>{each.svg}<figcaption>{escape(each.caption)}</figcaption></figure>"
        for each in drawn
    )
    return f'<div class="figures">{shown}</div>' if shown else ""


def table(
    head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, label: str = "table"
) -> str:
    """A table that scrolls by itself on a narrow screen; each row has a class and its cells."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(_row(kind, cells) for kind, cells in rows)
    # To be reached by keyboard, a region that scrolls needs a place in the tab order and a name.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definitions(items: Mapping[str, str]) -> str:
    """Names and what they stand for."""
    pairs = (f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in items.items())
    return f"<dl>{''.join(pairs)}</dl>"


def commands(typed: Sequence[str]) -> str:
    """What to type, each command once."""
    lines = "\n".join(escape(command) for command in dict.fromkeys(typed) if command)
    return f'<pre tabindex="0">{lines}</pre>' if lines else ""


def _row(kind: str, cells: Sequence[str]) -> str:
    first, *others = cells
    opening = f'<tr class="{kind}">' if kind else "<tr>"
    rest = "".join(f"<td>{_cell(cell)}</td>" for cell in others)
    return f'{opening}<th scope="row">{_cell(first)}</th>{rest}</tr>'


def _cell(text: str) -> str:
    """On a phone the interval goes below the mean."""
    mean, sign, half_width = escape(text).partition(" ± ")
    return f'{mean}<span class="interval"> ± {half_width}</span>' if sign else mean
