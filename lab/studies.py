"""The studies behind the docs' pages on results, tutorial and language models.

    python -m lab.studies --data-dir DIR --workers 2     # all, several hours
    python -m lab.studies --data-dir DIR --only noise long-sgd
    python -m lab.studies --list
    python -m lab.studies --pack                         # runs into tables
    python -m lab.studies --smoke                        # generated images, seconds

Finished runs are stored in one table per study, `results/NAME.jsonl.gz`; a run that two studies
share is trained once and stored in both. `results/studies.json` lists the studies. The docs' tables
are made from these files alone (`pages.py`), so a study whose code is gone keeps its tables. The
same command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab import options
from lab.cli import guarded
from lab.commands import place_of
from lab.files import write_text
from lab.image_studies import IMAGES
from lab.language_studies import LANGUAGE
from lab.progress import Progress
from lab.runs import INDEX, TABLE, RunRecord, read_index, read_table, write_table
from lab.store import Store
from lab.study import Study
from lab.sweep import run_sweep

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
    """Add finished runs from `runs/` to the tables of the studies that need them.

    Stored rows stay, also those of arms that are no longer planned. A study has no table if it
    shares all of its finished runs with earlier studies.
    """
    store, taken = Store(folder), set[str]()
    index = read_index(folder / INDEX) if (folder / INDEX).exists() else {}
    for study in STUDIES.values():
        path = folder / f"{study.name}{TABLE}"
        rows = read_table(path) if path.exists() else []
        rows = list({run.arm_settings["key"]: run for run in [*rows, *study.found(store)]}.values())
        planned = {run.key for run in study.runs()}
        if {run.arm_settings["key"] for run in rows} - taken:
            write_table(path, rows)
        taken |= planned
        planned |= {run.arm_settings["key"] for run in rows}
        index[study.name] = {
            "name": study.name,
            "page": study.page,
            "question": study.question,
            "command": study.command,
            "planned": len(planned),
        }
    write_text(folder / INDEX, json.dumps({"studies": list(index.values())}, indent=1) + "\n")
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
