"""The style of all plots, readable in colour, in grayscale and on dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import wraps
from html import escape
from itertools import count
from typing import Any, NamedTuple, ParamSpec

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Settings = ParamSpec("Settings")

INK = "#010203"  # looks black; replaced by the page's text colour in SVG
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "primum",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


class Look(NamedTuple):
    """How a series is drawn: colour, line style, marker."""

    colour: str
    dashes: str
    marker: str


# The Okabe-Ito palette without its yellow, which is hard to see on white.
LOOKS = (
    Look("#0072B2", "-", "o"),
    Look("#D55E00", "--", "D"),
    Look("#009E73", "-.", "s"),
    Look("#CC79A7", ":", "^"),
    Look("#E69F00", "-", "v"),
    Look("#56B4E9", "--", "P"),
)
# Names that look the same in every plot.
NAMED = {
    "base": LOOKS[0],
    "plain": LOOKS[0],
    "primum": LOOKS[1],
    "head": LOOKS[1],
    "permuted": LOOKS[2],
    "lr-matched": LOOKS[3],
    "uniform": LOOKS[3],
    "network": LOOKS[4],
    "paper": LOOKS[5],
}


def _all_looks() -> Iterator[Look]:
    """Yields the six looks, then each colour with the dashes and marker of the next look, etc."""
    for place in count():
        turn, own = divmod(place, len(LOOKS))
        other = LOOKS[(own + turn) % len(LOOKS)]
        yield Look(LOOKS[own].colour, other.dashes, other.marker)


def looks(names: list[str]) -> dict[str, Look]:
    """A look for each name: its own, or the next free one; all different up to 36 names."""
    given = {name: NAMED[name] for name in names if name in NAMED}
    own = set(given.values())
    free = (look for look in _all_looks() if look not in own)
    for name in names:
        if name not in given:
            given[name] = next(free)
    return {name: given[name] for name in names}


def styled(draw: Callable[Settings, Figure]) -> Callable[Settings, Figure]:
    """Decorator: draw with this module's matplotlib settings, leaving the user's unchanged."""

    @wraps(draw)
    def in_style(*args: Settings.args, **kwargs: Settings.kwargs) -> Figure:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def canvas(width: float = 5.2, height: float = 3.4) -> tuple[Figure, Axes]:
    """An empty figure with axes, small enough for its text to be readable on a phone."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def to_svg(figure: Figure, label: str) -> str:
    """SVG to embed in HTML, in the page's text colour and font, with unique ids and no links.

    The page's style may set the six colours: `--series-1` to `--series-6`.

    Args:
        figure: A figure made by this package.
        label: Description for screen readers; must be unique within a page.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # not needed in HTML
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    for number, look in enumerate(LOOKS, 1):  # dark pages may set lighter colours
        for colour in (look.colour, look.colour.lower()):
            svg = svg.replace(f": {colour}", f": var(--series-{number}, {colour})")
    svg = re.sub(r"font: ([^;\"]*?[\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    own = re.sub(r"\W+", "-", label)  # a page may have several plots
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # fills the page's width
    svg = "\n".join(line.rstrip() for line in svg.splitlines())
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
