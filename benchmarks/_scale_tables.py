"""The tables of docs/scale.md: from the results of `ranks.py` and from the library's own costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from _common import markdown_table
from _scale import (
    FLOAT,
    WAYS,
    Case,
    auto,
    chosen,
    chosen_at,
    memory,
    operations,
    sent,
    sharded,
)
from scipy.optimize import nnls

from primum import ways

Row = dict[str, Any]
PARAMS = 10**9  # of the model that the costs are compared with
SCALES = (8, 64, 1024)
HEADS = ((64, 10), (768, 1000), (2048, 1000), (4096, 32_000), (4096, 128_000))
BATCHES = (4096, 32_768, 262_144)
SEQUENCES = ((4096, 32_000, 1024, 2048), (4096, 128_000, 1024, 2048))  # the last: positions
GPU = (1000, 10**9)  # operations per byte and per collective, see the page
MODELS = {  # parameters, inputs and outputs of the head, global batch
    "ResNet-18": (11_690_000, 512, 1000, 1024),
    "ResNet-50": (25_560_000, 2048, 1000, 1024),
    "ViT-B/16": (86_570_000, 768, 1000, 4096),
    "ViT-L/16, 21,841 classes": (325_700_000, 1024, 21_841, 4096),
}


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
        "ways": _at_scale(_way),
        "sharded": _at_scale(_sharded),
        "traffic": _at_scale(_traffic),
        "compute": _at_scale(_compute),
        "held": _at_scale(_held),
        "models": _models(),
        "machines": _machines(),
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


def cases(ranks: int) -> list[Case]:
    """AdamW: its gain is a matrix, so nothing factorises."""
    grid = [(*head, batch, 1) for head in HEADS for batch in BATCHES]
    return [
        Case(inputs, outputs, batch, ranks, "adamw", positions)
        for inputs, outputs, batch, positions in [*grid, *SEQUENCES]
    ]


def _at_scale(cell: Callable[[Case], str]) -> str:
    header = ["head", "global batch", *(f"{ranks:,} ranks" for ranks in SCALES)]
    cells = []
    for each in zip(*(cases(ranks) for ranks in SCALES), strict=True):
        first = each[0]
        batch = f"{first.batch:,}"
        if first.positions > 1:
            batch += f" of {first.positions:,} positions"
        head = f"{first.inputs:,} x {first.outputs:,}"
        cells.append([head, batch, *(cell(case) for case in each)])
    return markdown_table(header, cells)


def taken(case: Case) -> str:
    """The way that `scope="auto"` takes in a model of `PARAMS` parameters."""
    return auto(case, PARAMS)


def _way(case: Case) -> str:
    return taken(case) if taken(case) != "local" else f"alone ({chosen(case)})"


def _sharded(case: Case) -> str:
    """The same under `fully_shard`."""
    way = sharded(case, PARAMS)
    return way if way != "local" else f"alone ({sharded(case, None)})"


def _traffic(case: Case) -> str:
    """Traffic of each way relative to the gradients' all-reduce; the choice of `auto` is bold."""
    own = ways.ring(FLOAT * PARAMS, case.ranks)
    parts = []
    for way in WAYS[1:]:
        text = _share(sent(way, case).wire / own)
        parts.append(f"**{text}**" if way == taken(case) else text)
    return " / ".join(parts)


def _models() -> str:
    """On 8 ranks: the choice of `scope="auto"`, and each way's share of the model's traffic."""
    header = ["model", "head", "global batch", "auto", *WAYS[1:], "with a GPU's constants"]
    cells = []
    for name, (params, inputs, outputs, batch) in MODELS.items():
        case = Case(inputs, outputs, batch, 8, "adamw")
        own = ways.ring(FLOAT * params, case.ranks)
        shares = [_share(sent(way, case).wire / own) for way in WAYS[1:]]
        does = auto(case, params)
        does = f"alone ({chosen(case)})" if does == "local" else does
        head = f"{inputs:,} x {outputs:,}"
        cells.append([name, head, f"{batch:,}", does, *shares, chosen_at(case, *GPU)])
    return markdown_table(header, cells)


def _share(value: float) -> str:
    percent = 100 * value
    digits = 2 if percent < 1 else 1 if percent < 10 else 0
    return f"{percent:,.{digits}f}%"


def _compute(case: Case) -> str:
    """FLOPs relative to those of the model, 6 per parameter and position."""
    training = 6.0 * PARAMS * case.own * case.positions
    return " / ".join(_share(operations(way, case) / training) for way in WAYS)


def _held(case: Case) -> str:
    return " / ".join(_size(memory(way, case)) for way in WAYS)


def _size(count: int) -> str:
    for unit in ("KiB", "MiB", "GiB"):
        count_in = count / 2 ** {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
        if count_in < 1000 or unit == "GiB":
            break
    return f"{count_in:,.0f} {unit}" if count_in >= 10 else f"{count_in:.1f} {unit}"


def _machines() -> str:
    """Cases in which other machines would choose another way."""
    header = ["head", "global batch", *(f"{ranks:,} ranks" for ranks in SCALES)]
    cells = []
    for each in zip(*(cases(ranks) for ranks in SCALES), strict=True):
        now = [chosen(case) for case in each]
        then = [chosen_at(case, *GPU) for case in each]
        if now != then:
            both = [a if a == b else f"{b} instead of {a}" for a, b in zip(now, then, strict=True)]
            first = each[0]
            cells.append([f"{first.inputs:,} x {first.outputs:,}", f"{first.batch:,}", *both])
    return markdown_table(header, cells)
