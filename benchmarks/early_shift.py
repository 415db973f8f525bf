"""Do 20 steps tell where primum pays? The common shift after one epoch, against the final gain.

docs/results.md has, for every setting in which radius 0.4 was compared with base, the share of a
step that moves the logits of all samples alike, averaged over a whole run. Users are advised to
measure 20 steps. This trains one epoch of plain training in each setting, measures the next 20
steps, and compares both shares with the gain of the stored runs.

    python benchmarks/early_shift.py --data-dir DIR     # both CIFARs; ten minutes on one core
    python benchmarks/early_shift.py --quick            # generated images, seconds
    python benchmarks/early_shift.py --render           # stored shares, with the gains of today
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _common import Report, Table, make_parser, use_threads
from scipy.stats import spearmanr

from primum.experiments.formatting import show
from primum.experiments.job import own_random_numbers
from primum.experiments.settings import RunSettings
from primum.experiments.shift_meter import CommonShift
from primum.experiments.shift_page import Shift, shifts
from primum.experiments.shift_runs import shift_runs
from primum.experiments.study_results import Results, in_words
from primum.experiments.tasks import load
from primum.experiments.trainer import Trainer

STEPS = 20
HEAD = ("setting", "20 steps, %", "lowest and highest, %", "whole run, %", "gain, points")
NOTE = (
    "Share of a step that moves the logits of all samples alike, in plain training, one seed: over "
    "the 20 steps after the first epoch (mean, lowest and highest), and the mean over a whole run "
    "(study `common-shift`). gain: test accuracy of radius 0.4 minus base's, with its seeds."
)


def early_shares(settings: RunSettings, data: Any) -> list[float]:
    """Share of the common shift in each of the 20 steps after the first epoch."""
    with own_random_numbers(settings.seed, torch.device("cpu")):
        trainer = Trainer(replace(settings, shift_every=1), data)
        while trainer.step_count < len(trainer.batches):
            trainer.step()
        meter = CommonShift()
        trainer.callbacks.append(meter)
        for _ in range(STEPS):
            trainer.step()
        trainer.close()
    return meter.table["common_shift"]


def compared(
    found: dict[str, list[float]], stored: dict[str, Shift]
) -> tuple[Table, dict[str, float], str]:
    """The table, the rank correlations, and a sentence; `stored` has whole runs and gains."""
    rows = []
    for name, shares in sorted(found.items(), key=lambda item: -fmean(item[1])):
        whole, gain = "–", "–"
        if name in stored:
            whole = f"{100 * stored[name].share:.0f}"
            gain = f"{show(stored[name].gain, 1, sign='+')} ({stored[name].gain.count})"
        span = f"{100 * min(shares):.0f} to {100 * max(shares):.0f}"
        rows.append([name, f"{100 * fmean(shares):.0f}", span, whole, gain])
    both = [(fmean(found[name]), stored[name]) for name in found if name in stored]
    ranks = {}
    if len(both) > 2:
        early, whole_runs = [share for share, _ in both], [each.share for _, each in both]
        gains = [each.gain.mean for _, each in both]
        ranks = {
            "20 steps and gain": float(spearmanr(early, gains).statistic),
            "whole run and gain": float(spearmanr(whole_runs, gains).statistic),
            "20 steps and whole run": float(spearmanr(early, whole_runs).statistic),
        }
    shown = ", ".join(f"{pair} {value:.2f}" for pair, value in ranks.items()) or "too few settings"
    return (HEAD, rows), ranks, f"Spearman's rank correlation over {len(both)} settings: {shown}."


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all settings, print and write a table."""
    parser = make_parser("early_shift.py", __doc__, quick="two tiny settings, generated images")
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="folder with cifar10/ and cifar100/ as Parquet files")
    add("--cache-dir", metavar="DIR", help="folder for decoded images")
    add("--results", type=Path, default=Path("results"), metavar="DIR",
        help="folder with the stored runs (%(default)s)")  # fmt: skip
    add("--render", action="store_true", help="measure nothing, compare stored shares again")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        runs, stored = [replace(run, epochs=8) for run in shift_runs(smoke=True)[:2]], {}
    else:
        runs, known = shift_runs(), shifts(Results(arguments.results))
        stored = {in_words(each.run.settings): each for each in known}
    found: dict[str, list[float]] = {}
    record = None
    with use_threads(1):
        report = Report("early_shift.py", argv, arguments.out)
        if arguments.render:
            content = json.loads(arguments.out.read_text(encoding="utf-8"))
            found, record = content["shares"], content["environment"]
        else:
            for run in runs:
                name = in_words(run.shared())
                found[name] = early_shares(run, load(run, arguments.data_dir, arguments.cache_dir))
                print(f"{name}: {fmean(found[name]):.0%}", flush=True)
    table, ranks, line = compared(found, stored)
    report.save({"shares": found, "ranks": ranks}, table, line, NOTE, record=record)
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
