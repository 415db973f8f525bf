"""The studies behind the docs' pages on results, tutorial and language models.

    python -m primum.experiments.studies --data-dir DIR --workers 2     # all, several hours
    python -m primum.experiments.studies --data-dir DIR --only noise long-sgd
    python -m primum.experiments.studies --list
    python -m primum.experiments.studies --pack                         # runs into tables
    python -m primum.experiments.studies --smoke                        # generated images, seconds
    python -m primum.experiments.studies --pages [--check]              # tables and plots

Finished runs are stored in one table per study, `results/NAME.jsonl.gz`; a run that two studies
share is trained once. The same command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from primum.experiments import options
from primum.experiments.cli import guarded
from primum.experiments.commands import place_of
from primum.experiments.image_studies import IMAGES
from primum.experiments.language_studies import LANGUAGE
from primum.experiments.progress import Progress
from primum.experiments.runs import TABLE, RunRecord, write_table
from primum.experiments.store import Store
from primum.experiments.study import Study
from primum.experiments.sweep import run_sweep

TINY = (
    "--data generated --image-size 8 --classes 4 --train-size 64 --test-size 12 --epochs 1 "
    "--batch-size 8"
)
TINY_TEXT = (
    "--task language --train-size 2000 --test-size 400 --length 8 --batch-size 4 --steps 4 "
    "--evaluate-steps 2 --warmup-steps 1"
)


STUDIES: dict[str, Study] = {study.name: study for study in (*IMAGES, *LANGUAGE)}


def smoke(study: Study) -> Study:
    """The study's arms on a few generated images."""
    if study.smoke_runs is not None:
        return replace(study, own_runs=study.smoke_runs)
    arms = study.words.split("--arms")[1]
    if study.page == "language":
        return replace(study, words=f"{TINY_TEXT} --arms {arms}", seeds=1)
    model = "--model vit-micro " if "vit-micro" in study.words else ""
    return replace(study, words=f"{model}{TINY} --arms {arms}", seeds=1)


def pack(folder: Path) -> None:
    """Move finished runs from `runs/` to the table of the first study that needs them."""
    store = Store(folder)
    taken: set[str] = set()
    for study in STUDIES.values():
        runs = {run.key: run for run in study.runs() if run.key not in taken}
        found = {key: record for key, run in runs.items() if (record := store.find(run))}
        if found:
            write_table(folder / f"{study.name}{TABLE}", found.values())
        taken |= found.keys()
    for study in STUDIES.values():
        for run in study.runs():
            store.run_path(run).unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the studies; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train the runs behind the docs' results.")
    parser.add_argument("--only", nargs="+", choices=STUDIES, metavar="NAME", default=list(STUDIES))
    parser.add_argument("--seeds", type=options.at_least(1), metavar="N", help="at most N seeds")
    parser.add_argument("--list", action="store_true", help="list studies, finished runs, commands")
    parser.add_argument("--smoke", action="store_true", help="generated images; keeps nothing")
    parser.add_argument("--pack", action="store_true", help="only move finished runs from "
                        "OUT/runs to the tables")  # fmt: skip
    parser.add_argument("--pages", action="store_true", help="update tables and plots of the docs")
    parser.add_argument("--check", action="store_true", help="with --pages: write nothing, exit "
                        "with 1 if a page would change")  # fmt: skip
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR")
    options.add_place(parser, "results")
    arguments = parser.parse_args(argv)
    chosen = [STUDIES[name] for name in arguments.only]
    if arguments.seeds is not None:
        chosen = [replace(each, seeds=min(each.seeds, arguments.seeds)) for each in chosen]
    if arguments.list:
        store = Store(arguments.out)
        for study in chosen:
            made, planned = len(study.found(store)), len(study.runs())
            print(f"{study.name}: {made} of {planned} runs. {study.question}\n  {study.command}")
        return 0

    def work() -> int:
        if arguments.pages:
            from primum.experiments.pages import make_pages

            return make_pages(arguments.out, arguments.docs, check=arguments.check)
        if arguments.smoke:
            with tempfile.TemporaryDirectory() as folder:
                arguments.out = Path(folder)
                for study in chosen:
                    run_study(smoke(study), arguments)
            return 0
        for study in chosen if not arguments.pack else ():
            run_study(study, arguments)
        pack(arguments.out)
        return 0

    return guarded("studies", work)


def run_study(study: Study, arguments: argparse.Namespace) -> list[RunRecord]:
    """Train the missing runs of a study."""
    arguments.command = study.command
    print(f"\n{study.name}: {study.question}", flush=True)
    return run_sweep(study.runs(), place_of(arguments), Progress())


if __name__ == "__main__":
    sys.exit(main())
