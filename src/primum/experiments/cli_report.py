"""`primum report`: from run files to a page."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any


def add_report(subcommands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    report = subcommands.add_parser(
        "report",
        help="one page that compares runs: verdict, table, pictures, settings",
        description="Read runs and write one self-contained HTML page: what they say in words, a "
        "table with intervals, pictures, settings, versions, and how to do it again. Runs with the "
        "same name and settings are compared, arm by arm and seed by seed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    report.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run's JSON file, results.json of primum demo, or a folder with such files",
    )
    report.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page"
    )
    report.add_argument("--title", default="What did the steps do?", help="heading of the page")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from primum.experiments.report import read_runs, render_runs
    from primum.experiments.report.groups import group_runs
    from primum.experiments.report.words import headline
    from primum.experiments.runs import RunError, write_whole

    out: Path = arguments.out
    try:
        records = read_runs(arguments.runs)
        write_whole(out, render_runs(records, title=arguments.title))
    except (RunError, OSError) as error:
        print(f"primum report: {error}", file=sys.stderr)
        return 1
    for group in group_runs(records):
        print(f"{group.title}: {headline(group)}")
    print(f"\n{len(records)} run(s). Report: {shlex.quote(str(out))}")
    return 0
