"""`python -m lab reproduce`: an experiment of the paper, or the speedrun, and what it found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.budgets import NOTE, TARGET, Budgets
from lab.claims import TABLES
from lab.cli import PAPER, SPEEDRUN
from lab.commands import place_of, progress_of, write_summary
from lab.errors import UserError
from lab.evidence import cells_of, findings_of, records_of, runs_of
from lab.files import write_text
from lab.job import Place
from lab.judge import Outcome
from lab.scales import SEEDS, SMALL_TABLES, SMOKE, Scale
from lab.speedrun import NOTES, best_precision, speedrun_runs
from lab.sweep import check_workers, run_sweep
from lab.tables import group_runs
from lab.torchrun import joined

ROOT = Path(__file__).resolve().parents[1]
GRAM = "All of the paper's sizes, on one thread of a CPU instead of a Tesla T4, two seconds each."


@dataclass(frozen=True)
class Experiment:
    """A part of the paper: title, the paper's number of seeds, and what the small scale reduces."""

    title: str
    small: str
    seeds: int | None = None  # None: run once
    cpu_only: bool = False


EXPERIMENTS: dict[str, Experiment] = {
    **{name: Experiment(t.title, SMALL_TABLES, t.seeds) for name, t in TABLES.items()},
    "figure1": Experiment(
        "Figure 1: how well the last layer approximates the network",
        "The small CNN for ResNet-20 and the small transformer for ViT-small, 10,000 images, 10 "
        "epochs instead of 100.",
    ),
    "figure2": Experiment(
        "Figure 2: convergence of the solver",
        "Networks of lab/bench/solvers.py, 150 steps, five problems of each.",
        cpu_only=True,
    ),
    "gram": Experiment("Table 3: cost of the Gram matrix, SGD", GRAM, cpu_only=True),
    "gram-adamw": Experiment("Table 4: cost of the Gram matrix, AdamW", GRAM, cpu_only=True),
}


def reproduce(arguments: argparse.Namespace) -> int:
    """Train or measure what is missing; print and write the findings."""
    name, scale = arguments.name, arguments.scale
    experiment = EXPERIMENTS[name]
    check_workers(arguments.workers, arguments.threads, arguments.data_workers)
    if experiment.seeds is None and (arguments.seeds is not None or arguments.workers > 1):
        raise UserError(f"{name} is run once, in one process; leave out --seeds and --workers")
    if experiment.cpu_only and arguments.device != "cpu":
        raise UserError(f"{name} runs on the CPU; leave out --device {arguments.device}")
    folder = scale_folder(arguments)
    place = place_of(arguments, folder)
    seeds = range(arguments.seeds or SEEDS.get(scale) or experiment.seeds or 1)
    scripts = None
    with joined(arguments.device) as ranks:
        runs = runs_of(name, scale, seeds, arguments.device)
        if not runs:
            scripts = run_scripts(name, scale, place)
        records = run_sweep(runs, place, progress_of(ranks)) if runs else []
    if not ranks.leads:
        return 0
    found = {run.key: record for run, record in zip(runs, records, strict=True)}
    cells = {
        label: {arm: [run.key for run in own] for arm, own in arms.items()}
        for label, arms in cells_of(name, scale, seeds, arguments.device).items()
    }
    outcome = Outcome(
        name=name,
        title=experiment.title,
        scale=scale,
        findings=tuple(findings_of(name, scale, records_of(cells, found), scripts)),
        command=arguments.command,
        environment=place.environment,
        notes={"full": (), "small": (experiment.small,), "smoke": (SMOKE,)}[scale],
        runs=cells,
        scripts=scripts or {},
    )
    print(f"\n{outcome.text()}")
    write_text(folder / f"{name}.json", outcome.json())
    write_text(folder / f"{name}.md", outcome.page())
    print(f"\nWritten: {folder / name}.json and .md")
    return 0


def speedrun(arguments: argparse.Namespace) -> int:
    """Train missing runs; print and write the gain of each arm at each budget."""
    folder = scale_folder(arguments)
    place = place_of(arguments, folder)
    with joined(arguments.device) as ranks:
        runs = speedrun_runs(
            arguments.scale,
            None if arguments.seeds is None else range(arguments.seeds),
            budgets=arguments.budgets,
            train_size=arguments.train_size,
            device=arguments.device,
            precision=arguments.precision or best_precision(arguments.device),
        )
        records = run_sweep(runs, place, progress_of(ranks))
    if not ranks.leads:
        return 0
    budgets = Budgets(records)
    about = NOTES[arguments.scale]
    tables = f"{budgets.table()}\n\n{NOTE}\n\n{budgets.to_target()}\n\n{TARGET}"
    page = f"# Speedrun on CIFAR-10\n\n{about}\n\n{tables}\n"
    print(f"\n{about}\n\n{tables}")
    write_text(folder / "speedrun.md", f"{page}\n```sh\n{arguments.command}\n```\n")
    budgets.plot().savefig(folder / "speedrun.png", dpi=130, facecolor="white")
    write_summary(group_runs(records), records, folder, arguments.command, "Speedrun on CIFAR-10")
    print(f"\nWritten: speedrun.md, speedrun.png, summary.json and report.html in {folder}")
    return 0


def scale_folder(arguments: argparse.Namespace) -> Path:
    """The folder of a scale's runs; raises if it has some and they are not to be resumed."""
    folder: Path = Path(arguments.out) / arguments.scale
    if any(folder.glob("runs/*.json")) and not arguments.resume:
        raise UserError(
            f"{folder} already has runs; choose another --out, or leave out --no-resume"
        )
    return folder


def list_experiments() -> int:
    """Print all experiments and their number of runs at each scale."""
    width = max(map(len, EXPERIMENTS))
    for name in PAPER:
        print(f"{name.ljust(width)}  {EXPERIMENTS[name].title}")
        if name in TABLES:
            seeds = {"full": TABLES[name].seeds, **SEEDS}
            runs = {s: len(runs_of(name, s, range(n))) for s, n in seeds.items()}  # type: ignore[arg-type]
            listed = (f"{scale} {runs[scale]} runs, {seeds[scale]} seed(s)" for scale in runs)
            print(" " * (width + 2) + "; ".join(listed))
    for scale in ("full", "small", "smoke"):
        print(f"{SPEEDRUN.ljust(width)}  {scale}: {len(speedrun_runs(scale))} runs. {NOTES[scale]}")
    print(
        "\nA run at small takes about a minute on one core. Experiments share runs: "
        "ablation-radius uses\nthose of table1 for radius 0.2. The others take minutes at small."
    )
    return 0


def run_scripts(name: str, scale: Scale, place: Place) -> dict[str, Any]:
    """Results of an experiment's scripts in `lab/bench`, by name."""
    if name == "figure2":
        more = {
            "smoke": ["--batches", "16", "--steps", "6", "--problems", "2", "--seconds", "0.02"],
            "small": ["--problems", "5", "--exact-up-to", "128", "--seconds", "0.1"],
            "full": [],
        }[scale]
        sources = {"digits": ["--dataset", "digits"]}
        if scale != "smoke" and place.data_dir is not None:
            folders = cifar_folders(Path(place.data_dir))
            sources = {k: ["--dataset", k, "--data-dir", str(v)] for k, v in folders.items()}
        return {
            source: _run_script("solvers", [*words, *more], place, f"solvers-{source}-{scale}")
            for source, words in sources.items()
        }
    optimizer = "adamw" if name == "gram-adamw" else "sgd"
    words = ["--optimizer", optimizer]
    if scale == "small":
        words += ["--seconds", "2", "--gain-steps", "100"]
    elif scale == "smoke":
        heads = {"sgd": ["64x10x128", "64x100x128", "64x100x512"], "adamw": ["384x10x128"]}
        words += ["--sizes", *heads[optimizer], "--seconds", "0.2", "--gain-steps", "2"]
        words += ["--repeats", "3", "--gain-batch", "16"]
    return {optimizer: _run_script("gram", words, place, f"gram-{optimizer}-{scale}")}


def cifar_folders(folder: Path) -> dict[str, Path]:
    """Subfolders with training images of CIFAR-10 and CIFAR-100, by name."""
    places = {
        name: folder if folder.name == name else folder / name for name in ("cifar10", "cifar100")
    }
    found = {name: place for name, place in places.items() if any(place.glob("train-*.parquet"))}
    if not found:
        raise UserError(
            f"no cifar10/train-*.parquet and no cifar100/train-*.parquet in {folder}; "
            "without --data-dir, digits are used instead"
        )
    return found


def _run_script(name: str, options: list[str], place: Place, result: str) -> dict[str, Any]:
    """Run a script in `lab/bench` and return the JSON that it writes."""
    out = place.store.folder.resolve() / f"{result}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", f"lab.bench.{name}", *options, "--out", str(out)]
    shown = None if sys.stderr.isatty() else subprocess.DEVNULL  # its progress
    done = subprocess.run(words, cwd=ROOT, stdout=shown, check=False)
    if done.returncode != 0:
        raise UserError(f"lab.bench.{name} failed with exit code {done.returncode}, see above")
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content
