"""The tables of docs/scale.md: from the results of `ranks.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from _common import markdown_table
from _scale import (
    WAYS,
    Case,
    chosen,
    chosen_at,
    operations,
)
from scipy.optimize import nnls

from primum import ways

Row = dict[str, Any]


# On this machine a byte was nearly free and a collective cost milliseconds; see the page.
HERE = (1, 5e7)
CHOICES: dict[str, Callable[[Case], str]] = {
    "the library's constants": chosen,
    "operations per byte 1, per collective 5e7": lambda case: chosen_at(case, *HERE),
    "always gather": lambda case: "gather",
    "always rows": lambda case: "rows",
    "always sum": lambda case: "sum",
}


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Markdown tables by name; `content` is the JSON that `ranks.py` writes."""
    rows: list[Row] = content["results"]
    return {
        "bytes": _bytes(rows),
        "time": _time(rows),
        "fit": _fit(rows),
        "regret": _regret(rows),
        "memory": _memory(rows),
    }


def case_of(row: Row) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def _bytes(rows: Sequence[Row]) -> str:
    header = ["head", "ranks", "way", "collectives", "payload: formula", "counted"]
    header += ["ring: formula", "written to sockets", "framing"]
    cells = []
    for row in rows:
        if row["optimizer"] != "sgd" or row["batch"] != 512 or not row["collectives"]:
            continue
        line = [case_of(row).head, str(row["ranks"]), row["way"], str(row["collectives"])]
        line += [f"{row['payload_formula']:,}", f"{row['payload']:,}"]
        line += [f"{row['wire_formula']:,.0f}"]
        if row["wire"] is None:
            line += ["unknown", "unknown"]
        else:
            framing = (row["wire"] - row["wire_formula"]) / row["collectives"]
            framing /= row["ranks"] - 1
            line += [f"{row['wire']:,.0f}", f"{framing:,.0f}"]
        cells.append(line)
    return markdown_table(header, cells)


def _time(rows: Sequence[Row]) -> str:
    """A row for each optimizer, head and batch; the way that the library chose is bold."""
    counts = sorted({row["ranks"] for row in rows})
    measured = [way for way in WAYS if any(row["way"] == way for row in rows)]
    columns = [(ranks, way) for ranks in counts for way in (measured if ranks > 1 else WAYS[:1])]
    header = ["optimizer", "head", "batch", "plain ms, by ranks"]
    header += [f"{ranks}: {way}" for ranks, way in columns]
    found: dict[tuple[str, str, int], dict[tuple[int, str], Row]] = {}
    for row in rows:
        key = row["optimizer"], case_of(row).head, row["batch"]
        found.setdefault(key, {})[row["ranks"], row["way"]] = row
    cells = []
    for (optimizer, head, batch), by in found.items():
        plain = ", ".join(f"{by[ranks, 'local']['plain_ms']:.0f}" for ranks in counts)
        line = [optimizer, head, f"{batch:,}", plain]
        for ranks, way in columns:
            text = f"{by[ranks, way]['ratio']:.2f}"
            bold = ranks > 1 and way == by[ranks, way]["chosen"]
            line.append(f"**{text}**" if bold else text)
        cells.append(line)
    return markdown_table(header, cells)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Nanoseconds per FLOP, byte and collective: nonnegative least squares fit of the added time.

    Errors are relative. Assumes that processes share two cores.
    """
    known = [row for row in rows if row["with_ms"] > row["plain_ms"]]
    added = np.array([1e6 * (row["with_ms"] - row["plain_ms"]) for row in known])
    causes = np.array(
        [
            [
                operations(row["way"], case_of(row)) * max(1, row["ranks"] / 2),
                row["wire_formula"],
                row["collectives"],
            ]
            for row in known
        ]
    )
    size = causes.max(0)
    found, _ = nnls(causes / size / added[:, None], np.ones(len(added)))
    operation, byte, message = (float(each) for each in found / size)
    error = np.abs(causes @ (found / size) / added - 1)
    return {
        "operation": operation,
        "byte": byte,
        "message": message,
        "error": median(error.tolist()),
        "rows": len(known),
    }


def _fit(rows: Sequence[Row]) -> str:
    header = ["ranks", "operations per ns", "ns per byte", "us per collective"]
    header += ["operations per byte", "operations per collective", "median error"]
    cells = []
    for ranks in sorted({row["ranks"] for row in rows if row["ranks"] > 1}):
        own = fit([row for row in rows if row["ranks"] == ranks])
        line = [f"{ranks} on 2 cores", f"{1 / own['operation']:.0f}", f"{own['byte']:.2f}"]
        line += [f"{own['message'] / 1e3:,.0f}", f"{own['byte'] / own['operation']:.0f}"]
        line += [f"{own['message'] / own['operation']:.1e}", f"{100 * own['error']:.0f}%"]
        cells.append(line)
    own_costs = [str(ways.PER_BYTE), f"{ways.PER_MESSAGE:.1e}"]
    cells.append(["the library's", "", "", "", *own_costs, ""])
    return markdown_table(header, cells)


def regret(rows: Sequence[Row], choose: Callable[[Case], str] = chosen) -> list[float]:
    """Step time of the chosen way relative to the fastest, for every case over several ranks."""
    times: dict[Case, dict[str, float]] = {}
    for row in rows:
        if row["way"] != "local":
            times.setdefault(case_of(row), {})[row["way"]] = row["with_ms"]
    return [by[choose(case)] / min(by.values()) for case, by in times.items()]


def _regret(rows: Sequence[Row]) -> str:
    header = ["choice", "the faster way", "step, times the faster's: mean", "worst"]
    cells = []
    for name, choose in CHOICES.items():
        found = regret(rows, choose)
        best = sum(each == 1 for each in found)
        mean, worst = sum(found) / len(found), max(found)
        cells.append([name, f"{best} of {len(found)}", f"{mean:.2f}", f"{worst:.2f}"])
    return markdown_table(header, cells)


def _memory(rows: Sequence[Row]) -> str:
    header = ["optimizer", "head", "ranks"]
    measured = [way for way in WAYS if any(row["way"] == way for row in rows)]
    header += [f"{way}: {what}" for way in measured for what in ("model MiB", "measured")]
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        if row["batch"] == 512 and row["ranks"] > 1:
            key = row["optimizer"], case_of(row).head, row["ranks"]
            found.setdefault(key, {})[row["way"]] = row
    cells = []
    for (optimizer, head, ranks), by in found.items():
        line = [optimizer, head, str(ranks)]
        for way in measured:
            line += [f"{by[way][which] / 2**20:.2f}" for which in ("held_model", "held")]
        cells.append(line)
    return markdown_table(header, cells)
