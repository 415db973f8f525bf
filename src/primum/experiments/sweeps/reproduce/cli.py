"""`primum reproduce`: a table or figure of the paper, at a scale of one's choice."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCALES = ("full", "small", "smoke")
NAMES = (
    "table1",
    "table2a",
    "table2b",
    "ablation-radius",
    "figure1",
    "figure2",
    "multilayer",
    "gram",
    "gram-adamw",
)


def add_reproduce(subcommands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    reproduce = subcommands.add_parser(
        "reproduce",
        help="a table or figure of the paper, its values beside ours",
        description="Train or measure what a part of the paper reports, and say of each of its "
        "claims: reproduced, not reproduced, or not run. full is the paper's own setting, for "
        "GPUs; small takes two cores an hour or two; smoke a minute, and only shows that it runs. "
        "Finished runs are kept, and shared between experiments of one scale.",
    )
    reproduce.add_argument("name", nargs="?", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    reproduce.add_argument("--list", action="store_true", help="what there is, and what it costs")
    reproduce.add_argument("--scale", choices=SCALES, default="small", help="(%(default)s)")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="instead of the scale's own")
    reproduce.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take up and reuse runs in --out; without, refuse a folder that has some",
    )
    reproduce.add_argument("--workers", type=int, default=1, metavar="K", help="runs at a time (1)")
    reproduce.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    reproduce.add_argument("--data-workers", type=int, default=0, metavar="N", help="of images (0)")
    reproduce.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    reproduce.add_argument("--data-dir", metavar="DIR", help="folder of the data; else the hub")
    reproduce.add_argument("--cache-dir", metavar="DIR", help="where decoded images are kept")
    reproduce.add_argument("--out", type=Path, default=Path("runs/reproduce"), metavar="DIR")
    reproduce.add_argument("--checkpoint-seconds", type=float, default=30.0, metavar="S")
    reproduce.set_defaults(run=_reproduce)


def _reproduce(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from primum.experiments.sweeps.command import guarded
    from primum.experiments.sweeps.compare import typed_command

    if arguments.list:
        return _list()
    if arguments.name is None:
        parser.error(f"primum reproduce needs a name, one of {', '.join(NAMES)}, or --list")
    return guarded(
        "reproduce", arguments.out, lambda: _run(arguments, typed_command(arguments.typed))
    )


def _list() -> int:
    from primum.experiments.sweeps.reproduce.accuracy import TABLES
    from primum.experiments.sweeps.reproduce.experiments import EXPERIMENTS
    from primum.experiments.sweeps.reproduce.scales import SEEDS
    from primum.experiments.sweeps.reproduce.training import table_runs

    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        print(f"{name.ljust(width)}  {experiment.title}")
        if name in TABLES:
            table = TABLES[name]
            seeds = {"full": table.seeds, **SEEDS}
            runs = {
                scale: len(table_runs(table, scale, range(count), "cpu"))
                for scale, count in seeds.items()
            }
            told = (f"{scale} {runs[scale]} runs, {seeds[scale]} seed(s)" for scale in runs)
            print(" " * (width + 2) + "; ".join(told))
    print(
        "\nA run at small takes about a minute on one core. Experiments share runs: "
        "ablation-radius has\nthose of table1 for radius 0.2. What is not a table takes minutes at "
        "small."
    )
    return 0


def _run(arguments: argparse.Namespace, command: str) -> int:
    from dataclasses import replace

    from primum.experiments.sweeps.command import place_of
    from primum.experiments.sweeps.ranks import joined
    from primum.experiments.sweeps.reproduce import findings
    from primum.experiments.sweeps.reproduce.experiments import EXPERIMENTS
    from primum.experiments.sweeps.reproduce.scales import SEEDS, SMOKE
    from primum.experiments.sweeps.settings import SettingsError
    from primum.experiments.sweeps.store import Store, write_safely
    from primum.experiments.sweeps.sweep import check_workers

    experiment, scale = EXPERIMENTS[arguments.name], arguments.scale
    folder: Path = arguments.out / scale
    check_workers(arguments.workers, arguments.threads, arguments.data_workers)
    if experiment.seeds is None and (arguments.seeds is not None or arguments.workers > 1):
        raise SettingsError(
            f"{arguments.name} is made once and by one process; leave out --seeds and --workers"
        )
    place = replace(place_of(arguments, command), store=Store(folder))
    made = [*folder.glob("runs/*.json"), *folder.glob("parts/*.json")]
    if made and not arguments.resume:
        raise SettingsError(f"{folder} has runs already; choose another --out, or let them be used")
    count = arguments.seeds or (SEEDS.get(scale) or experiment.seeds or 1)
    with joined(arguments.device) as ranks:
        found = experiment.run(scale, range(count), place, arguments.device)
    if not ranks.leads:
        return 0
    outcome = findings.Outcome(
        name=arguments.name,
        title=experiment.title,
        scale=scale,
        findings=tuple(found),
        command=command,
        environment=place.environment,
        notes={"full": (), "small": (experiment.small,), "smoke": (SMOKE,)}[scale],
    )
    print(f"\n{outcome.title}, {scale}\n\n{findings.text_table(found)}\n\n{outcome.verdict}")
    write_safely(folder / f"{arguments.name}.json", findings.as_json(outcome).encode())
    write_safely(folder / f"{arguments.name}.md", findings.markdown(outcome).encode())
    print(f"\nWritten: {folder / arguments.name}.json and .md")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m primum.experiments.sweeps.reproduce.cli ...`, without the other commands."""
    parser = argparse.ArgumentParser(prog="primum")
    add_reproduce(parser.add_subparsers(required=True))
    words = ["reproduce", *(sys.argv[1:] if argv is None else argv)]
    arguments = parser.parse_args(words)
    arguments.typed = words
    return int(arguments.run(arguments, parser))


if __name__ == "__main__":
    sys.exit(main())
