"""Cost of several ranks: bytes and time of a step, for each strategy of `primum.distributed`.

Models train under DistributedDataParallel on the CPU, with gloo, over 1, 2 and 4 processes of one
thread each: plain, with `scope="local"`, and with `scope="global"` by gathering and by summing.
They take turns, one step each, in alternating order; ratios are of medians, with 95%
bootstrap intervals over the rounds.

- Bytes: those counted by `Collectives.bytes`, against a formula that must give the same number;
  and those that the first rank's process wrote to its sockets beyond plain training, against a
  ring's traffic. The difference is gloo's framing: at most 576 bytes per collective and other rank.
- Time: wall time until the slowest rank has stepped. With more processes than cores they share the
  cores: on 2 cores, 4 processes take twice as long to compute as on 4.
- Memory: peak of torch's allocator while primum computes weights, over what it held before.

    python -m lab.bench.ranks                          # ten minutes on two busy cores
    python -m lab.bench.ranks --quick                  # seconds

The tables of docs/scale.md come from a run before the way "rows" was removed, at commit `165a6b6`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench._common import (
    Report,
    make_parser,
    parse_quick,
    positive,
    ratio_of_medians,
    use_threads,
)
from lab.bench._scale import WAYS, Case, chosen, sent

CHILD = "lab.bench._rank"
FULL: dict[str, Any] = {
    "sizes": [
        *((64, 10, batch) for batch in (128, 512, 2048)),
        *((384, 100, batch) for batch in (128, 512, 2048)),
        *((768, 1000, batch) for batch in (128, 512)),  # 2048 would take minutes by itself
    ],
    "processes": [1, 2, 4],
    "seconds": 2.0,
    "repeats": 30,
}
QUICK: dict[str, Any] = {
    "sizes": [(8, 3, 16)],
    "processes": [1, 2],
    "seconds": 0.2,
    "repeats": 3,
}
SETTING = (
    "Processes of one thread each share the cores: with more processes than cores, computing "
    "takes longer than it would with a core for each."
)
HEADER = [
    "optimizer", "head", "batch", "ranks", "way", "plain ms", "with ms", "ratio", "95% interval",
    "payload B", "formula", "on the wire B", "ring", "held KiB", "chosen", "auto",
    "pairs",
]  # fmt: skip


def launch(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Results of all cases over that many processes. Progress goes to stderr."""
    logs = [folder / f"errors-{ranks}-{rank}.txt" for rank in range(1, ranks)]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", CHILD, str(folder), str(rank), str(ranks)]
            if rank == 0:
                children.append(subprocess.Popen(command))
            else:
                with logs[rank - 1].open("wb") as log:
                    children.append(subprocess.Popen(command, stderr=log))
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    if any(codes):
        told = "\n".join(log.read_text()[-2000:] for log in logs)
        raise RuntimeError(f"{ranks} processes ended with {codes}\n{told}")
    found: list[dict[str, Any]] = json.loads((folder / f"results-{ranks}.json").read_text())
    return found


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one case, one for each way."""
    case, arms = Case(**result["case"]), result["arms"]
    plain, rows = arms["plain"], []
    for way in WAYS:
        if way not in arms:
            continue
        own = arms[way]
        ratio, low, high = ratio_of_medians(own["seconds"], plain["seconds"])
        expected = sent(way, case)
        known = own["wire"] is not None and plain["wire"] is not None
        rows.append(
            asdict(case)
            | {
                "way": way,
                "params": result["params"],
                "pairs": len(own["seconds"]),
                "plain_ms": 1e3 * median(plain["seconds"]),
                "with_ms": 1e3 * median(own["seconds"]),
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "payload": own["payload"],
                "payload_formula": expected.payload,
                "wire": own["wire"] - plain["wire"] if known else None,
                "wire_plain": plain["wire"],
                "wire_formula": expected.wire,
                "collectives": expected.collectives,
                "held": own["held"],
                "chosen": chosen(case) if case.ranks > 1 else "local",
                "auto": chosen(case, result["params"]) if case.ranks > 1 else "local",
            }
        )
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["optimizer"],
        f"{row['inputs']}x{row['outputs']}",
        str(row["batch"]),
        str(row["ranks"]),
        row["way"],
        f"{row['plain_ms']:.1f}",
        f"{row['with_ms']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}",
        str(row["payload"]),
        str(row["payload_formula"]),
        "unknown" if row["wire"] is None else f"{row['wire']:.0f}",
        f"{row['wire_formula']:.0f}",
        f"{row['held'] / 2**10:.0f}",
        "yes" if row["chosen"] == row["way"] else "no",
        "alone" if row["auto"] == "local" else row["auto"],
        str(row["pairs"]),
    ]


def regret(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Step time of the chosen way relative to the fastest, for every case over several ranks."""
    times: dict[Case, dict[str, float]] = {}
    for row in rows:
        if row["way"] != "local":
            case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
            times.setdefault(case, {})[row["way"]] = row["with_ms"]
    return [by[chosen(case)] / min(by.values()) for case, by in times.items()]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Summary of the table, one line for each finding."""
    wrong = [row for row in rows if row["payload"] != row["payload_formula"]]
    lines = [f"Payload: {len(rows) - len(wrong)} of {len(rows)} rows are what the formula says."]
    several = [row for row in rows if row["collectives"]]
    framing = [
        (row["wire"] - row["wire_formula"]) / row["collectives"] / (row["ranks"] - 1)
        for row in several
        if row["wire"] is not None
    ]
    if framing:
        lines.append(
            f"On the wire, over the formula: {min(framing):.0f} to {max(framing):.0f} bytes for "
            "every collective and other rank."
        )
    regrets = regret(rows)
    if regrets:
        best = sum(each <= 1 for each in regrets)
        lines.append(
            f"The way chosen was the faster one in {best} of {len(regrets)} cases; its step took "
            f"{median(regrets):.2f} (median) and at most {max(regrets):.2f} times the faster one's."
        )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("ranks.py", __doc__, quick="one small case over 1 and 2 processes")
    add = made.add_argument
    add("--processes", nargs="+", type=positive, metavar="N", help="default: 1 2 4")
    add("--seconds", type=float, help="time budget for the rounds of a case (default: 2)")
    add("--repeats", type=positive, help="maximum rounds of a case (default: 30)")
    return parse_quick(made, argv, FULL, QUICK)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    cases = [
        {"inputs": inputs, "outputs": outputs, "batch": batch, "optimizer": optimizer}
        for inputs, outputs, batch in options.sizes
        for optimizer in ("sgd", "adamw")
    ]
    rows: list[dict[str, Any]] = []
    with use_threads(1):
        report = Report("ranks.py", argv, options.out, clock="wall time")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"cases": cases, "seconds": options.seconds, "repeats": options.repeats}
        (folder / "settings.json").write_text(json.dumps(settings))
        for ranks in options.processes:
            rows += [row for result in launch(ranks, folder) for row in rows_of(result)]
            report.save(
                {"verdicts": verdicts(rows), "results": rows},
                (HEADER, [cells(row) for row in rows]),
                [*verdicts(rows), SETTING],
            )
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
