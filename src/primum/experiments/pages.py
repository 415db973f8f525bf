"""Generate the tables and plots of the docs from stored runs."""

from __future__ import annotations

from pathlib import Path

from primum.experiments.files import write_text
from primum.experiments.language_page import MAKERS as LANGUAGE
from primum.experiments.language_page import PLOTS as LANGUAGE_PLOTS
from primum.experiments.language_page import language_plots
from primum.experiments.results_page import MAKERS, NOT_RUN, PLOTS
from primum.experiments.results_plots import results_plots
from primum.experiments.studies import STUDIES
from primum.experiments.study_results import Results
from primum.experiments.text_tables import fill_page
from primum.experiments.tutorial_page import MAKERS as TUTORIAL
from primum.experiments.tutorial_page import tutorial_plots

PAGES = ("guide", "results", "claims", "tutorial", "language")
ALL = MAKERS | TUTORIAL | LANGUAGE


def filled(text: str, results: Results) -> str:
    """A page with its tables filled in."""

    def table(name: str) -> str:
        there = name not in STUDIES or results.runs[name]
        made = ALL[name](results) if there else NOT_RUN
        if there and name in PLOTS:
            made = f"![{PLOTS[name]}](images/results-{name}.png)\n\n{made}"
        if there and name in LANGUAGE_PLOTS:
            made = f"![{LANGUAGE_PLOTS[name]}](images/{name}.png)\n\n{made}"
        return made

    return fill_page(text, table)


def make_pages(folder: Path, docs: Path, *, check: bool = False) -> int:
    """Write tables and plots of the docs; with `check`, only report whether tables would change."""
    results = Results(folder)
    pages = [docs / f"{name}.md" for name in PAGES]
    before = [page.read_text(encoding="utf-8") for page in pages]
    after = [filled(text, results) for text in before]
    if check:
        changed = [page.name for page, a, b in zip(pages, before, after, strict=True) if a != b]
        if changed:
            print(f"out of date: {', '.join(changed)}; run this without --check")
        return int(bool(changed))
    for page, text in zip(pages, after, strict=True):
        write_text(page, text)
    drawn = results_plots(results) | tutorial_plots(results.runs["tutorial"])
    drawn |= language_plots(results)
    for name, figure in drawn.items():
        path = docs / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
        print(f"wrote {path.name}")
    return 0
