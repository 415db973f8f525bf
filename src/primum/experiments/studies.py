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
from functools import partial
from pathlib import Path

from primum.experiments import options
from primum.experiments.cli import guarded
from primum.experiments.commands import place_of
from primum.experiments.language_studies import LANGUAGE
from primum.experiments.progress import Progress
from primum.experiments.runs import TABLE, RunRecord, write_table
from primum.experiments.speedrun import speedrun_runs, tuning_runs
from primum.experiments.store import Store
from primum.experiments.study import Study
from primum.experiments.sweep import run_sweep
from primum.experiments.tuned import rate_runs, tuned_runs
from primum.experiments.tutorial_runs import tiny, tutorial_runs

SMALL = "--radius 0.2 --train-size 5000 --test-size 5000 --evaluate-every 2"
LARGE = "--radius 0.2 --train-size 10000 --test-size 5000 --evaluate-every 4"
RESNET = (
    "--model resnet20 --lr 0.05 --train-size 5000 --test-size 5000 --epochs 8 --evaluate-every 2"
)
STABLE = "--warmup 1 --clip 1"
MAIN = "base paper primum primum@radius=0.4"
CONTROLS = (
    "base paper primum primum@radius=0.1 primum@radius=0.4 permuted normalised lr-matched "
    "time-matched focal loss-weighted"
)
SCHEDULES = (
    "base primum primum@radius=0.4 primum@radius=0.4,radius_schedule=grow-linear "
    "primum@radius=0.4,radius_schedule=fade-linear"
)
PARTS = "base primum@radius=0.4 primum@radius=0.4,part=head primum@radius=0.4,part=backbone"
LOOKS = (
    "base primum@radius=0.4 primum@radius=0.4,second_look=head "
    "primum@radius=0.4,second_look=network damped@damping=0.5 damped"
)
RIVALS = (
    "base primum primum@radius=0.4 upgrad upgrad-network upgrad-network@upgrad_scale=mean-1 mgda"
)
RATES = "--lr-scale 0.25 0.5 1 2 4"
TINY = (
    "--data generated --image-size 8 --classes 4 --train-size 64 --test-size 12 --epochs 1 "
    "--batch-size 8"
)
TINY_TEXT = (
    "--task language --train-size 2000 --test-size 400 --length 8 --batch-size 4 --steps 4 "
    "--evaluate-steps 2 --warmup-steps 1"
)


_ALL = (
    Study(
        "speedrun-tuning",
        "Which learning rate and weight decay suit plain training best, at each budget?",
        own_runs=tuning_runs,
        smoke_runs=partial(tuning_runs, "smoke"),
    ),
    Study(
        "speedrun",
        "A strong recipe: what is gained at which budget?",
        own_runs=partial(speedrun_runs, "full", budgets=(2, 4, 8)),
        smoke_runs=partial(speedrun_runs, "smoke"),
    ),
    Study(
        "tuned-rates",
        "Which learning rate suits plain training best, on 20,000 images?",
        own_runs=rate_runs,
        smoke_runs=partial(rate_runs, smoke=True),
    ),
    Study(
        "tuned",
        "Longer training of the small networks at base's best learning rate: what is gained?",
        own_runs=tuned_runs,
        smoke_runs=partial(tuned_runs, smoke=True),
    ),
    Study(
        "controls-sgd",
        "Is it better than plain training, and is it more than a larger step, more time or "
        "emphasis on hard samples? SGD",
        f"{SMALL} --optimizer sgd --arms {CONTROLS}",
        10,
    ),
    Study(
        "controls-adamw",
        "The same with AdamW",
        f"{SMALL} --optimizer adamw --arms {CONTROLS}",
        10,
    ),
    Study(
        "rates-sgd",
        "Best against best: learning rates from a quarter to four times, SGD",
        f"{SMALL} --optimizer sgd {RATES} --arms {MAIN}",
    ),
    Study(
        "long-sgd",
        "What is left after 40 epochs, and does a growing or shrinking radius keep it? SGD",
        "--radius 0.2 --train-size 5000 --test-size 5000 --evaluate-every 5 --epochs 40 "
        f"--optimizer sgd --arms {SCHEDULES}",
        5,
    ),
    Study(
        "radius",
        "How large should the radius be?",
        f"{SMALL} --optimizer sgd adamw --arms base primum@radius=0.1 primum primum@radius=0.4 "
        "primum@radius=0.8",
        10,
    ),
    Study(
        "cifar100",
        "A hundred classes",
        f"{SMALL} --data cifar100 --optimizer sgd adamw --arms {MAIN}",
        5,
    ),
    Study(
        "noise",
        "Wrong labels: does it hurt to emphasise samples that are harmed?",
        f"{SMALL} --optimizer sgd --label-noise 0 0.1 0.4 --arms base paper primum "
        "primum@radius=0.4",
        5,
    ),
    Study(
        "batches-sgd",
        "Large batches, up to where the paper fails: SGD",
        f"{LARGE} --optimizer sgd --batch-size 512 1024 --arms {MAIN}",
        10,
    ),
    Study(
        "batches-adamw",
        "Large batches, AdamW",
        f"{LARGE} --optimizer adamw --batch-size 512 --arms base paper primum",
    ),
    Study(
        "vit",
        "A small transformer",
        f"{SMALL} --model vit-micro --optimizer adamw --arms {MAIN}",
        5,
    ),
    Study(
        "resnet",
        "A ResNet-20",
        "--radius 0.2 --model resnet20 --train-size 5000 --test-size 2000 --epochs 8 "
        "--arms base paper primum",
    ),
    Study(
        "resnet-controls",
        "Where the gain is largest: is it a larger step, or a damped common shift of the logits?",
        f"{RESNET} --arms base primum@radius=0.4 damped lr-matched@radius=0.4 permuted@radius=0.4",
    ),
    Study(
        "resnet-stabilised",
        "The same network with a warm-up and clipped gradients: what is left of the gain?",
        f"{RESNET} {STABLE} --arms base primum@radius=0.4",
    ),
    Study(
        "cnn-stabilised",
        "The small CNN with a warm-up and clipped gradients: what is left of the gain?",
        f"{SMALL} {STABLE} --arms base primum@radius=0.4",
        5,
    ),
    Study(
        "rates-adamw",
        "Best against best, AdamW",
        f"{SMALL} --optimizer adamw {RATES} 8 16 --arms base paper primum",
    ),
    Study(
        "upgrad",
        "The nearest published alternative, in batches of 32",
        f"{SMALL} --batch-size 32 --optimizer sgd adamw --arms base primum upgrad "
        "upgrad@upgrad_scale=mean-1",
    ),
    Study(
        "parts",
        "Where do the weights work: on the gradient of the head, of the backbone, or of both?",
        f"{SMALL} --optimizer sgd --arms {PARTS}",
    ),
    Study(
        "second-look",
        "Does it add anything to solve again once the backbone has moved? Is it the common shift "
        "of the logits that is damped?",
        f"{SMALL} --optimizer sgd --arms {LOOKS}",
        4,
        page="guide",
    ),
    Study(
        "rivals",
        "Best against best: UPGrad on the whole network, and MGDA on groups, in batches of 32",
        f"{SMALL} --batch-size 32 --optimizer sgd --lr-scale 0.25 0.5 1 2 --arms {RIVALS}",
    ),
    Study(
        "tutorial",
        "What does a step do to its samples?",
        own_runs=tutorial_runs,
        smoke_runs=lambda: [tiny(run) for run in tutorial_runs()[14:19]],
        page="tutorial",
    ),
    *LANGUAGE,
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}


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
