"""The runs behind docs/results.md: what primum does to test accuracy, and why, on CIFAR subsets.

    python benchmarks/studies.py --data-dir DIR --workers 2            # all, several hours
    python benchmarks/studies.py --data-dir DIR --only noise long-sgd
    python benchmarks/studies.py --list
    python benchmarks/studies.py --smoke                               # generated images, seconds

DIR holds the folders cifar10 and cifar100 with Parquet files. Each study is one `primum compare`;
all of them share results/runs, so a run that two of them need is made once, and the same command
again goes on where it was stopped. `python benchmarks/studies_page.py` makes the page.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primum.experiments.runs import RunRecord
from primum.experiments.sweeps import compare, options
from primum.experiments.sweeps.command import guarded, place_of
from primum.experiments.sweeps.plan import plan
from primum.experiments.sweeps.progress import Progress
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.store import Store
from primum.experiments.sweeps.sweep import run_sweep

RESULTS = Path(__file__).resolve().parents[1] / "results"

SMALL = "--train-size 5000 --test-size 5000 --evaluate-every 2"
LARGE = "--train-size 10000 --test-size 5000 --evaluate-every 4"
MAIN = "base paper primum primum@radius=0.4"
CONTROLS = (
    "base paper primum primum@radius=0.1 primum@radius=0.4 permuted normalised lr-matched "
    "time-matched focal loss-weighted"
)
SCHEDULES = (
    "base primum primum@radius=0.4 primum@radius=0.4,radius_schedule=grow-linear "
    "primum@radius=0.4,radius_schedule=fade-linear"
)
NAMES = {  # on the page; others keep theirs
    "primum@radius=0.1": "primum, radius 0.1",
    "primum@radius=0.4": "primum, radius 0.4",
    "primum@radius=0.8": "primum, radius 0.8",
    "primum@radius=0.4,radius_schedule=grow-linear": "radius 0 to 0.4",
    "primum@radius=0.4,radius_schedule=fade-linear": "radius 0.4 to 0",
    "upgrad@upgrad_scale=mean-1": "upgrad, mean 1",
}
RATES = "--lr-scale 0.25 0.5 1 2 4"


@dataclass(frozen=True)
class Study:
    """A question and the comparison that answers it.

    Attributes:
        name: On the command line.
        asks: What it asks.
        words: Options of `primum compare`.
        seeds: How many.
    """

    name: str
    asks: str
    words: str
    seeds: int

    @property
    def command(self) -> str:
        """To be typed by hand."""
        return f"primum compare {self.words} --seeds {self.seeds} --data-dir DIR --out results"

    def runs(self) -> list[RunSettings]:
        """All runs, in the order they are made."""
        arguments = self.parse()
        return plan(options.points(arguments), options.arms(arguments), range(arguments.seeds))

    def parse(self, *more: str) -> argparse.Namespace:
        """As `primum compare` would."""
        parser = argparse.ArgumentParser(prog="primum")
        compare.add_compare(parser.add_subparsers(required=True))
        words = ["compare", *shlex.split(self.words), "--seeds", str(self.seeds), *more]
        arguments = parser.parse_args(words)
        arguments.typed = words
        return arguments

    def found(self, store: Store) -> list[RunRecord]:
        """Its finished runs."""
        return [record for run in self.runs() if (record := store.find(run)) is not None]


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
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
            3,
        ),
        Study(
            "long-sgd",
            "What is left after 40 epochs, and does a radius that grows or fades keep it? SGD",
            f"--train-size 5000 --test-size 5000 --evaluate-every 5 --epochs 40 --optimizer sgd "
            f"--arms {SCHEDULES}",
            5,
        ),
        Study(
            "radius",
            "How far may a step be bent?",
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
            3,
        ),
        Study(
            "batches-adamw",
            "Large batches, AdamW",
            f"{LARGE} --optimizer adamw --batch-size 512 --arms base paper primum",
            3,
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
            "--model resnet20 --train-size 5000 --test-size 2000 --epochs 8 --arms base paper "
            "primum",
            3,
        ),
        Study(
            "rates-adamw",
            "Best against best, AdamW",
            f"{SMALL} --optimizer adamw {RATES} 8 16 --arms base paper primum",
            3,
        ),
        Study(
            "upgrad",
            "The nearest published alternative, in batches of 32",
            f"{SMALL} --batch-size 32 --optimizer sgd adamw --arms base primum upgrad "
            "upgrad@upgrad_scale=mean-1",
            3,
        ),
    )
}
TINY = (
    "--data generated --image-size 8 --classes 4 --train-size 64 --test-size 12 --epochs 1 "
    "--batch-size 8"
)


def named(arm: str) -> str:
    """An arm in words."""
    return NAMES.get(arm, arm)


def run_study(study: Study, arguments: argparse.Namespace, out: Path) -> None:
    """Make what is missing."""
    place_words = ["--out", str(out), "--workers", str(arguments.workers)]
    for name in ("data_dir", "cache_dir"):
        if (value := getattr(arguments, name)) is not None:
            place_words += [f"--{name.replace('_', '-')}", value]
    parsed = study.parse(*place_words)
    place = place_of(parsed, study.command)
    runs = study.runs()
    print(f"\n{study.name}: {study.asks}", flush=True)
    run_sweep(runs, place, Progress())


def smoke(study: Study) -> Study:
    """The same arms on next to nothing."""
    kept = study.words.split("--arms")[1]
    model = "--model vit-micro " if "vit-micro" in study.words else ""
    return replace(study, words=f"{model}{TINY} --arms {kept}", seeds=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the runs behind docs/results.md.")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the data; else the hub")
    parser.add_argument("--cache-dir", metavar="DIR", help="where decoded images are kept")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--workers", type=int, default=1, metavar="K", help="runs at a time (1)")
    parser.add_argument("--only", nargs="+", choices=STUDIES, metavar="NAME", default=list(STUDIES))
    parser.add_argument("--seeds", type=int, metavar="N", help="at most so many")
    parser.add_argument("--list", action="store_true", help="studies, runs missing, commands")
    parser.add_argument("--smoke", action="store_true", help="generated images, nothing kept")
    arguments = parser.parse_args(argv)
    chosen = [STUDIES[name] for name in arguments.only]
    if arguments.seeds is not None:
        chosen = [replace(each, seeds=min(each.seeds, arguments.seeds)) for each in chosen]
    if arguments.list:
        return show(chosen, Store(arguments.out))

    def work() -> int:
        if arguments.smoke:
            with tempfile.TemporaryDirectory() as folder:
                for study in chosen:
                    run_study(smoke(study), arguments, Path(folder))
            return 0
        for study in chosen:
            run_study(study, arguments, arguments.out)
        return 0

    return guarded("studies", arguments.out, work)


def show(studies: Sequence[Study], store: Store) -> int:
    """What there is, how much of it is made, and how."""
    for study in studies:
        print(f"{study.name}: {len(study.found(store))} of {len(study.runs())} runs. {study.asks}")
        print(f"  {study.command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
