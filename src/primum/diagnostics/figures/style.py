"""One look for all pictures, in colour, in grey and in the dark."""

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

INK = "#010203"  # black to the eye; in a page it stands for the page's text colour
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


# Okabe and Ito's palette without its yellow, which white paper swallows.
LOOKS = (
    Look("#0072B2", "-", "o"),
    Look("#D55E00", "--", "D"),
    Look("#009E73", "-.", "s"),
    Look("#CC79A7", ":", "^"),
    Look("#E69F00", "-", "v"),
    Look("#56B4E9", "--", "P"),
)
# What has a meaning of its own looks the same in every picture.
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
    """The six; then their colours with dashes and markers of the next, and so on, for ever."""
    for place in count():
        turn, own = divmod(place, len(LOOKS))
        other = LOOKS[(own + turn) % len(LOOKS)]
        yield Look(LOOKS[own].colour, other.dashes, other.marker)


def looks(names: list[str]) -> dict[str, Look]:
    """A look for each name: its own, or the next that is free; no two are the same up to 36."""
    given = {name: NAMED[name] for name in names if name in NAMED}
    own = set(given.values())
    free = (look for look in _all_looks() if look not in own)
    for name in names:
        if name not in given:
            given[name] = next(free)
    return {name: given[name] for name in names}


def styled(draw: Callable[Settings, Figure]) -> Callable[Settings, Figure]:
    """Draw with our settings of matplotlib, whatever the user's are, and leave his alone."""

    @wraps(draw)
    def in_style(*args: Settings.args, **kwargs: Settings.kwargs) -> Figure:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def canvas(width: float = 5.2, height: float = 3.4) -> tuple[Figure, Axes]:
    """Small, so that its text can still be read on a phone."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def to_svg(figure: Figure, label: str) -> str:
    """SVG to put inside HTML: the page's ink and font, names of its own, no outside links.

    The page's style may set the six colours: `--series-1` to `--series-6`.

    Args:
        figure: Of this package.
        label: What it shows, for readers who cannot see it; different for each picture of a page.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows the names by itself
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    for number, look in enumerate(LOOKS, 1):  # a dark page may set lighter ones
        for colour in (look.colour, look.colour.lower()):
            svg = svg.replace(f": {colour}", f": var(--series-{number}, {colour})")
    svg = re.sub(r"font: ([^;\"]*?[\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    own = re.sub(r"\W+", "-", label)  # several pictures share the page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # as wide as the page lets it be
    svg = "\n".join(line.rstrip() for line in svg.splitlines())
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
