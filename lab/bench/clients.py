"""Effect of primum.attach on loss and time in typical training scripts.

The scripts are our own, small, and follow the patterns of public training scripts. Each runs with
and without `primum.attach`, with the same seeds, so that runs can be compared in pairs. Nothing is
downloaded: images are scikit-learn's digits, text is Python's own help, and games and synthetic
data are generated.

    python -m lab.bench.clients                      # twelve minutes on one core
    python -m lab.bench.clients --data-dir CIFAR     # image scripts on CIFAR-10 (Parquet) instead
    python -m lab.bench.clients --quick              # a few steps of each, one seed

Writes lab/bench/results/clients.json, from which `python -m lab.pages` makes the
tables of docs/clients.md. With --quick, --only or --data-dir, results are written to --out alone,
and only if it is given. With --only, rows of other scripts in that file are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tqdm import tqdm

from lab.bench import _clients_frameworks, _clients_images, _clients_play, _clients_text
from lab.bench._clients import Run, Script, said
from lab.bench._clients_page import columns, row_cells
from lab.bench._common import RESULTS, Report, as_text, describe, positive, use_threads

SCRIPTS = [
    *_clients_images.SCRIPTS,
    *_clients_text.SCRIPTS,
    *_clients_play.SCRIPTS,
    *_clients_frameworks.SCRIPTS,
]
OUT = RESULTS / "clients.json"


def played(
    script: Script, settings: dict[str, Any] | None, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Metrics of one run."""
    settings = None if settings is None else dict(settings)
    paused = settings is not None and settings.pop("paused", False)
    run = Run(seed, settings, options.quick, paused, options.data_dir)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure = script.play(run)
    report = run.last
    return {
        "figure": figure,
        "step_ms": 1000 * median(run.steps),
        "steps": len(run.steps) + 1,
        "warnings": said(caught),
        "harmed": fmean(run.harmed) if run.harmed else None,
        "extra": run.extra,
        "fallbacks": None if report is None else int(report.fallbacks),
        "discarded": None if report is None else int(report.discarded),
    }


def rows_of(script: Script, runs: dict[str | None, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each arm, compared with the plain runs of the same seeds."""
    plain = runs[None]
    rows = []
    for added, with_it in runs.items():
        if added is None:
            continue
        extra: dict[str, list[float]] = {}
        for each in with_it:
            for name, value in each["extra"].items():
                extra.setdefault(name, []).append(value)
        rows.append(
            {
                "script": script.name,
                "pattern": script.pattern,
                "added": added,
                "figure": script.figure,
                "more_is_better": script.more_is_better,
                "steps": plain[0]["steps"],
                "plain": [each["figure"] for each in plain],
                "with": [each["figure"] for each in with_it],
                "plain_ms": fmean(each["step_ms"] for each in plain),
                "with_ms": fmean(each["step_ms"] for each in with_it),
                "harmed": _mean([each["harmed"] for each in with_it]),
                "warnings": list(dict.fromkeys(t for each in with_it for t in each["warnings"])),
                "fallbacks": max(each["fallbacks"] or 0 for each in with_it),
                "discarded": max(each["discarded"] or 0 for each in with_it),
                "extra": {name: fmean(values) for name, values in extra.items()},
            }
        )
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def measure(scripts: Sequence[Script], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all scripts; the arms of a seed run right after one another."""
    jobs = [(script, options.seeds or script.seeds) for script in scripts]
    total = sum(seeds * (1 + len(script.arms)) for script, seeds in jobs)
    rows: list[dict[str, Any]] = []
    with tqdm(total=total, desc="runs", unit="run", dynamic_ncols=True) as bar:
        for script, seeds in jobs:
            bar.set_postfix_str(script.name)
            arms: dict[str | None, dict[str, Any] | None] = {None: None} | {**script.arms}
            runs: dict[str | None, list[dict[str, Any]]] = {arm: [] for arm in arms}
            for seed in range(seeds):
                order = list(arms.items())
                for arm, settings in order if seed % 2 == 0 else reversed(order):
                    runs[arm].append(played(script, settings, seed, options))
                    bar.update()
            rows += rows_of(script, runs)
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="clients.py", description="primum in many scripts")
    made.add_argument("--quick", action="store_true", help="a few steps of each, one seed")
    made.add_argument("--seeds", type=positive, help="seeds per script (default: by script)")
    made.add_argument("--only", help="scripts with this text in their names")
    made.add_argument("--data-dir", type=Path, help="CIFAR-10: train-*.parquet, test-*.parquet")
    made.add_argument("--out", type=Path, help=f"JSON (default: lab/bench/results/{OUT.name})")
    made.add_argument("--note", help="a remark on this run, also shown on the page")
    options = made.parse_args(argv)
    if options.quick and options.seeds is None:
        options.seeds = 1
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    out = options.out or OUT
    scripts = [each for each in SCRIPTS if (options.only or "").lower() in each.name.lower()]
    if not scripts:
        names = ", ".join(each.name for each in SCRIPTS)
        raise SystemExit(f"no script has {options.only!r} in its name; there are: {names}")
    with use_threads(1):
        report = Report("clients.py", argv, out)
        rows = measure(scripts, options)
    content = {"environment": report.finish(), "rows": rows, "again": []}
    print(as_text(columns(), [row_cells(row) for row in rows]), end="\n\n")
    print(describe(report.record))
    if options.note:
        content["note"] = options.note
    whole = not (options.quick or options.only or options.data_dir)
    if whole or options.out:
        if options.only and out.exists():
            content = merged(json.loads(out.read_text(encoding="utf-8")), content)
        report.write(content)
        print(f"Written: {os.path.relpath(out)}")
    return 0


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Old results with new rows for scripts that were run again; `again` lists these runs."""
    fresh: dict[str, list[dict[str, Any]]] = {}
    for row in new["rows"]:
        fresh.setdefault(row["script"], []).append(row)
    rows: list[dict[str, Any]] = []
    for row in old["rows"]:
        if row["script"] not in fresh:
            rows.append(row)
        elif all(row["script"] != each["script"] for each in rows):
            rows += fresh[row["script"]]
    known = {row["script"] for row in rows}
    rows += [row for row in new["rows"] if row["script"] not in known]
    place = {script.name: number for number, script in enumerate(SCRIPTS)}
    rows.sort(key=lambda row: place.get(row["script"], len(place)))
    again = {"scripts": sorted(fresh), "environment": new["environment"]}
    notes = {"note": new["note"]} if "note" in new else {}
    return old | notes | {"rows": rows, "again": [*old.get("again", []), again]}


if __name__ == "__main__":
    raise SystemExit(main())
