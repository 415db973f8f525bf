"""Pages: one HTML file each, nothing fetched from anywhere, nothing that runs.

read.py       run files, folders of them, and what `primum demo` writes
groups.py     runs to be compared with each other, and the table of their figures
words.py      what the figures say
pictures.py   what can be drawn from a group
parts.py      the parts of a page
page.py       the page of any runs
demo.py       the page of `primum demo`
"""

from primum.experiments.report.demo import render
from primum.experiments.report.page import render_runs
from primum.experiments.report.read import read_runs

__all__ = ["read_runs", "render", "render_runs"]
