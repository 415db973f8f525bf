"""`primum reproduce speedrun`: train the runs and write a table and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path

from primum.experiments.budgets import NOTE, TARGET, Budgets
from primum.experiments.commands import place_of, progress_of, write_summary
from primum.experiments.errors import UserError
from primum.experiments.files import write_text
from primum.experiments.speedrun import NOTES, best_precision, speedrun_runs
from primum.experiments.sweep import run_sweep
from primum.experiments.tables import group_runs
from primum.experiments.torchrun import joined


def speedrun(arguments: argparse.Namespace) -> int:
    """Train missing runs; print and write the gain of each arm at each budget."""
    folder = Path(arguments.out) / arguments.scale
    if any(folder.glob("runs/*.json")) and not arguments.resume:
        raise UserError(
            f"{folder} already has runs; choose another --out, or leave out --no-resume"
        )
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
