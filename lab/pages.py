"""Fill the marked tables of the README and the docs from stored results, and draw the docs' plots.

    python -m lab.pages            # tables and plots
    python -m lab.pages --check    # write nothing; exit with 1 if a table is stale

A table is placed between `<!-- table NAME -->` and `<!-- end -->`. Tables are made from data alone:
`results/` for training runs, `lab/bench/results/` for costs. `benchmarks-NAME-2` is the second
table of `lab/bench/results/NAME.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.bench._clients_page import tables as clients_tables
from lab.cli import guarded
from lab.errors import UserError
from lab.files import write_text
from lab.language_page import MAKERS as LANGUAGE
from lab.language_page import PLOTS as LANGUAGE_PLOTS
from lab.language_page import language_plots
from lab.results_page import MAKERS, NOT_RUN, PLOTS
from lab.results_plots import results_plots
from lab.study_results import Results
from lab.text_tables import fill_page
from lab.tutorial_page import MAKERS as TUTORIAL
from lab.tutorial_page import tutorial_plots

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "lab" / "bench" / "results"
CLIENTS = "clients.md"  # its tables are made from a benchmark alone
ALL = MAKERS | TUTORIAL | LANGUAGE
IMAGES = {name: f"results-{name}" for name in PLOTS} | {name: name for name in LANGUAGE_PLOTS}


def study_table(results: Results, name: str) -> str:
    """A table of the studies, below its plot if it has one, or of a benchmark."""
    if name.startswith("benchmarks-"):
        stored, place = name.removeprefix("benchmarks-").rsplit("-", 1)
        text = (BENCH / f"{stored}.md").read_text(encoding="utf-8")
        found = [part for part in text.split("\n\n") if part.startswith("|")]
        return found[int(place) - 1].rstrip()
    if name in results.studies and not results.runs[name]:
        return NOT_RUN
    made = ALL[name](results)
    if name not in IMAGES:
        return made
    return f"![{(PLOTS | LANGUAGE_PLOTS)[name]}](images/{IMAGES[name]}.png)\n\n{made}"


def tables_of(page: Path, results: Results) -> Callable[[str], str]:
    """Returns the tables of a page by name."""
    if page.name != CLIENTS:
        return lambda name: study_table(results, name)
    text = (BENCH / "clients.json").read_text(encoding="utf-8")
    return clients_tables(json.loads(text)).__getitem__


def filled(page: Path, results: Results) -> tuple[str, str]:
    """The text of a page, as it is and with today's tables."""
    text = page.read_text(encoding="utf-8")
    if "<!-- table " not in text:
        return text, text
    try:
        return text, fill_page(text, tables_of(page, results))
    except KeyError as error:
        raise UserError(f"{page.name}: there is no table named {error}") from error


def make_pages(stored: Path, root: Path, *, check: bool = False) -> int:
    """Update `README.md` and `docs` in a folder; with `check`, report which would change."""
    results = Results(stored)
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    changed = {page: new for page in pages for old, new in [filled(page, results)] if old != new}
    if check:
        if changed:
            names = ", ".join(page.name for page in changed)
            print(f"out of date: {names}; run python -m lab.pages")
        return int(bool(changed))
    for page, text in changed.items():
        write_text(page, text)
        print(f"wrote {page.name}")
    drawn = results_plots(results) | tutorial_plots(results.runs["tutorial"])
    drawn |= language_plots(results)
    for name, figure in drawn.items():
        path = root / "docs" / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
        print(f"wrote {path.name}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check all pages; returns the exit code."""
    parser = argparse.ArgumentParser(description="Tables and plots of the README and the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a "
                        "table would change")  # fmt: skip
    check = parser.parse_args(argv).check
    return guarded("pages", lambda: make_pages(ROOT / "results", ROOT, check=check))


if __name__ == "__main__":
    sys.exit(main())
