"""`python -m lab demo`: a small grid of runs, and a report on them.

Learning rates and weight decays were tuned for the base arm only, by its test accuracy over seeds
that the demo does not use (grids of factor 2 in lr; the best lr is inside the grid). The schedule
is short on purpose: after 40 epochs every arm has fitted the training images, and faster training
no longer shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from lab.arms import Arm
from lab.commands import progress_of
from lab.files import write_text
from lab.formatting import arm_rows
from lab.job import Place
from lab.page import render
from lab.plan import plan
from lab.runs import RunRecord, environment, without_nan
from lab.settings import RunSettings
from lab.store import Store
from lab.sweep import cores, run_sweep
from lab.tables import group_runs
from lab.text_tables import text_table
from lab.torchrun import joined
from lab.verdicts import details, headline

WARMUP = 0.1  # of all epochs, for AdamW
CNN = RunSettings(
    model="digits-cnn",
    data="noisy-digits",
    train_size=512,
    augment="none",
    batch_size=64,
    epochs=15,
    lr=0.1,
    weight_decay=2e-3,
    observe_every=2,
    order="stream",
)
TRANSFORMER = replace(
    CNN, model="digits-transformer", optimizer="adamw", lr=1.6e-2, weight_decay=0.1
)
TITLES = {
    "digits-cnn": "Group-norm CNN, SGD with momentum",
    "digits-transformer": "Transformer, AdamW",
}
INTRODUCTION = (
    "An optimizer step is good for its batch on average and bad for some of its samples. Primum "
    "gives extra weight to samples so that the step harms fewer of them. Here two small models "
    "learn noisy handwritten digits from few samples: without primum (base), with it, and with two "
    "controls."
)
NOTES = (
    "Learning rate and weight decay were chosen for base alone; the learning rate follows a cosine "
    "down to 0. Times per step are CPU times of one thread, for steps that are not observed.",
    "The schedule is short, so faster training shows in the test metrics. A longer one "
    "(--epochs 40) shows how much of a difference remains once every arm has fitted the training "
    "images.",
)


def points(epochs: int = 15, train_size: int = 512) -> list[RunSettings]:
    """Settings of the demo's two models."""
    sizes = {"epochs": epochs, "train_size": train_size}
    return [replace(CNN, **sizes), replace(TRANSFORMER, **sizes, warmup=WARMUP * epochs)]  # type: ignore[arg-type]


def demo(arguments: argparse.Namespace) -> int:
    """Train missing runs, print tables and verdicts, write report.html and results.json."""
    if arguments.ranks > 1:
        return _with_torchrun(arguments)
    start = perf_counter()
    out: Path = arguments.out
    seeds, workers = arguments.seeds, min(arguments.threads, cores())
    chosen = points(arguments.epochs)
    if arguments.quick:
        seeds, workers, chosen = 2, 1, points(epochs=2, train_size=128)
    with joined("cpu") as ranks:
        workers = 1 if ranks.size > 1 else workers
        place = Place(
            Store(out),
            workers=workers,
            command=arguments.command,
            environment=environment(workers),
        )
        runs = plan(chosen, [Arm(name) for name in arguments.arms], range(seeds))
        found = run_sweep(runs, place, progress_of(ranks))
    if not ranks.leads:
        return 0
    records = [replace(record, name=TITLES[record.settings["model"]]) for record in found]
    seconds = perf_counter() - start
    write(records, out, arguments.command, seconds, place.environment)
    for group in group_runs(records):
        print(f"\n{group.title}; mean ± 95% interval over {seeds} seed(s)\n")
        print(text_table(arm_rows(group)))
        print("\n  " + "\n  ".join([headline(group), *details(group)]))
    print(f"\nDone in {seconds:.0f} s. Report: {out / 'report.html'}")
    return 0


def write(
    records: list[RunRecord], out: Path, command: str, seconds: float, made: dict[str, str]
) -> None:
    """Write report.html and results.json."""
    notes = [*NOTES, f"It took {seconds:.0f} s. The data are in results.json."]
    page = render(
        records,
        title="primum against plain training",
        introduction=[INTRODUCTION],
        notes=notes,
    )
    write_text(out / "report.html", page)
    content = {
        "format": "primum-demo-2",
        "command": command,
        "seconds": round(seconds, 1),
        "environment": made,
        "summary": [group.summary() for group in group_runs(records)],
        "runs": [record.as_dict() for record in records],
    }
    text = json.dumps(without_nan(content), indent=1, allow_nan=False)
    write_text(out / "results.json", text + "\n")


def _with_torchrun(arguments: argparse.Namespace) -> int:
    """Run the same command under torchrun, with one process per rank."""
    words = list(arguments.words)
    for place, word in enumerate(words):
        if word == "--ranks":
            del words[place : place + 2]
            break
        if word.startswith("--ranks="):
            del words[place]
            break
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ours = ["-m", "lab", *words]
    done = subprocess.run([sys.executable, *launcher, str(arguments.ranks), *ours], check=False)
    return done.returncode
