"""Weights per token with a large vocabulary: cost and quality of the approximate Gram operator.

    python -m lab.bench.tokens --text FILE     # all four parts, about half an hour
    python -m lab.bench.tokens --parts operations memory

quality      problems captured in plain training of small language models (vocabularies 100, 4,096
             and 32,000; SGD with momentum and AdamW; early and late): harm that approximate weights
             remove, measured by the exact Gram operator, relative to the exact solution
operations   FLOPs of matrix products, counted on meta tensors: what the weights add, divided by N H
             (N tokens, H entries of the head), and as a share of a GPT's step
memory       peak of a training step with a head of 32,000 x 768, in a process of its own (VmHWM),
             minus the peak before the first large step
time         a small model on one thread; plain, approximate and exact steps take turns

--text is any plain text file; the default is the language reference that comes with Python. Parts
that are not run keep their stored results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import primum
from lab.bench._common import (
    Part,
    Report,
    Table,
    clock_for,
    count_flops,
    describe,
    make_parser,
    positive,
    ratio_of_medians,
    take_turns,
    use_threads,
)
from lab.bench._sketches import Judge, product
from lab.bench._text import (
    SETTINGS,
    LanguageModel,
    Setting,
    batches,
    captured,
    numbered,
    optimizer_of,
    read_text,
)
from primum.kernel.batch import HeadBatch
from primum.kernel.head import Head
from primum.kernel.recipe import Primum
from primum.tokens.sketch import WIDTH, Sketched

OPTIMIZERS = ("sgd", "adamw")

# layers, width, vocabulary; sequences of 1,024 tokens
GPTS = {
    "124M": (12, 768, 12, 50_257),
    "124M, 32,000 words": (12, 768, 12, 32_000),
    "350M": (24, 1024, 16, 50_257),
    "1.3B": (24, 2048, 32, 50_257),
}


# --- quality --------------------------------------------------------------------------------------


def quality(text: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Scores on every captured problem."""
    rows = []
    for setting in args.settings:
        words = numbered(text, setting.vocabulary)
        steps = args.steps or setting.steps
        early = sorted({max(2, steps // 20), max(3, steps // 8)})
        late = sorted({steps - max(1, steps // 8), steps})
        for kind in OPTIMIZERS:
            for moment in captured(kind, words, setting, steps, early + late):
                if not float(moment.drift.clamp_min(0).sum()) > 0:
                    print(f"{setting.vocabulary} {kind} step {moment.number}: no harm")
                    continue
                judge = Judge(moment)
                where = {
                    "vocabulary": setting.vocabulary,
                    "optimizer": kind,
                    "step": moment.number,
                    "when": "early" if moment.number in early else "late",
                    "exact": judge.share,
                }
                width = min(WIDTH, setting.vocabulary // 2)
                found = judge.score(judge.weights(product(moment, width)))
                rows.append(where | {"width": width, "variant": "library"} | asdict(found))
                print(
                    f"{setting.vocabulary} {kind} step {moment.number}: exact removes "
                    f"{judge.share:.1%} of the harm, the library's {found.removed:.1%} of that",
                    flush=True,
                )
    return rows


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def quality_tables(rows: list[dict[str, Any]]) -> dict[str, Table]:
    ours = [row for row in rows if row["variant"] == "library"]
    lines = []
    cases = dict.fromkeys((row["vocabulary"], row["optimizer"], row["when"]) for row in ours)
    for case in cases:
        some = [r for r in ours if (r["vocabulary"], r["optimizer"], r["when"]) == case]
        vocabulary, kind, when = case
        name = f"{vocabulary:,}" + (", forced" if vocabulary <= WIDTH else "")
        lines.append([name, kind, when, str(some[0]["width"]), str(len(some)), *_figures(some)])
    header = ["vocabulary", "optimizer", "when", "k", "problems", "exact removes", "library, of it"]
    header += ["worst", "scaled to the radius", "length / radius", "longest"]
    return {"quality": (header, lines)}


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{_mean(rows, 'exact'):.1%}",
        f"{_mean(rows, 'removed'):.1%}",
        f"{min(row['removed'] for row in rows):.1%}",
        f"{_mean(rows, 'feasible'):.1%}",
        f"{_mean(rows, 'length'):.2f}",
        f"{max(row['length'] for row in rows):.2f}",
    ]


# --- operations -----------------------------------------------------------------------------------


def owner_of(kind: str, weight: Tensor) -> Optimizer:
    """An optimizer with state, as if in the middle of training; its values do not matter."""
    optimizer: Optimizer = SGD([weight], 0.1, 0.9) if kind == "sgd" else AdamW([weight])
    if kind == "sgd":
        optimizer.state[weight] = {"momentum_buffer": torch.empty_like(weight)}
    else:
        moments = {name: torch.empty_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(3.0, device="cpu"), **moments}
    return optimizer


def added(kind: str, tokens: int, width: int, words: int, *, exact: bool) -> tuple[int, bool]:
    """FLOPs that the weights add to a step with all iterations; whether they are approximate."""
    with torch.device("meta"), torch.no_grad(), count_flops() as count:
        head = nn.Linear(width, words, bias=False)
        owners = {"weight": owner_of(kind, head.weight)}
        batch = HeadBatch(torch.empty(tokens, width), torch.empty(tokens, words), per="token")
        recipe = Primum(radius=0.1, exact=exact)
        problem = Sketched().build(Head(head, owners), batch, recipe)
        recipe(problem)
    return count.get_total_flops(), problem.approximate


def step_of(layers: int, width: int, heads: int, words: int, sequences: int) -> int:
    """FLOPs of a GPT's forward and backward pass."""
    with torch.device("meta"), count_flops() as count:
        model = LanguageModel(words, width, 1024, layers, heads)
        F.cross_entropy(
            model(torch.zeros(sequences, 1024, dtype=torch.int64)),
            torch.zeros(sequences * 1024, dtype=torch.int64),
        ).backward()
    return count.get_total_flops()


def operations(_: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for width, words in ((768, 32_000), (96, 4096), (768, 50_257), (2048, 50_257)):
        for tokens in args.tokens:
            for kind in OPTIMIZERS:
                head = tokens * width * words
                ours, approximate = added(kind, tokens, width, words, exact=False)
                exact, _approximate = added(kind, tokens, width, words, exact=True)
                rows.append(
                    {
                        "head": f"{width} x {words:,}",
                        "tokens": tokens,
                        "optimizer": kind,
                        "approximate": approximate,
                        "added": ours / head,
                        "exact": exact / head,
                    }
                )
    for name, (layers, width, heads, words) in GPTS.items():
        whole = step_of(layers, width, heads, words, 8)
        for kind in OPTIMIZERS:
            ours, _approximate = added(kind, 8 * 1024, width, words, exact=False)
            exact, _approximate = added(kind, 8 * 1024, width, words, exact=True)
            figures = {"step": whole / 8192, "share": ours / whole, "exact_share": exact / whole}
            rows.append({"gpt": name, "optimizer": kind, "head": f"{width} x {words:,}"} | figures)
    return rows


def operations_tables(rows: list[dict[str, Any]]) -> dict[str, Table]:
    heads = [
        [
            row["head"],
            f"{row['tokens']:,}",
            row["optimizer"],
            "yes" if row["approximate"] else "no",
            f"{row['added']:.2f}",
            f"{row['exact']:.2f}",
        ]
        for row in rows
        if "gpt" not in row
    ]
    gpts = [
        [
            row["gpt"],
            row["head"],
            row["optimizer"],
            f"{row['step'] / 1e6:,.0f}",
            f"{row['share']:.1%}",
            f"{row['exact_share']:.1%}",
        ]
        for row in rows
        if "gpt" in row
    ]
    by_head = ["head", "tokens", "optimizer", "approximate", "added / N H", "exact=True / N H"]
    by_gpt = ["GPT", "head", "optimizer", "million operations per token"]
    return {
        "operations": (by_head, heads),
        "gpts": ([*by_gpt, "added", "added, exact=True"], gpts),
    }


# --- memory ---------------------------------------------------------------------------------------


def memory(_: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory by `_tokens_memory.py`, in processes that return freed memory at once."""
    frugal = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    rows = []
    for kind in OPTIMIZERS:
        for sequences in args.sequences:
            peaks = {}
            for arm in ("plain", "primum"):
                run = subprocess.run(
                    [
                        sys.executable,
                        *("-m", "lab.bench._tokens_memory"),
                        kind,
                        arm,
                        str(sequences),
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=os.environ | frugal,
                )
                start, peak = map(int, run.stdout.split())
                peaks[arm] = {"peak": peak / 1024, "rise": (peak - start) / 1024}
            rows.append({"optimizer": kind, "tokens": 128 * sequences} | peaks)
            print(rows[-1], flush=True)
    return rows


def memory_tables(rows: list[dict[str, Any]]) -> dict[str, Table]:
    lines = []
    for row in rows:
        one, two = row["plain"], row["primum"]
        lines.append(
            [
                row["optimizer"],
                f"{row['tokens']:,}",
                f"{one['peak']:.0f}",
                f"{two['peak']:.0f}",
                f"{two['peak'] / one['peak'] - 1:+.1%}",
                f"{two['rise'] / one['rise'] - 1:+.1%}",
            ]
        )
    header = ["optimizer", "tokens", "plain MiB", "with weights MiB", "of the peak"]
    return {"memory": ([*header, "of the peak above the start"], lines)}


# --- time -----------------------------------------------------------------------------------------


def seconds(text: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time per step of a small model with a large vocabulary, on one thread; arms take turns."""
    setting = Setting(32_000, 128, 4, 128, 0) if args.steps is None else args.settings[-1]
    words, rows = numbered(text, setting.vocabulary), []
    for kind in OPTIMIZERS:
        arms = {}
        for arm in ("plain", "approximate", "exact"):
            torch.manual_seed(0)
            model = LanguageModel(setting.vocabulary, setting.width, setting.positions, 4)
            optimizer = optimizer_of(kind, model)
            if arm != "plain":
                recipe = Primum(radius=0.1, exact=arm == "exact")
                primum.attach(model, optimizer, per="token", recipe=recipe)
            endless = batches(words, setting, 10**6, torch.Generator().manual_seed(0))

            def step(
                model: nn.Module = model, optimizer: Optimizer = optimizer, data: Any = endless
            ) -> None:
                inputs, labels = next(data)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

            for _ in range(3):
                step()
            arms[arm] = step
        times = take_turns(list(arms.values()), args.seconds, 40, 7, clock_for(1))
        found = dict(zip(arms, times, strict=True))
        ratios = {
            arm: ratio_of_medians(found[arm], found["plain"]) for arm in ("approximate", "exact")
        }
        medians = {arm: 1e3 * median(found[arm]) for arm in arms}
        about = {"optimizer": kind, "tokens": setting.sequences * setting.positions}
        rows.append(about | {"rounds": len(times[0]), "ms": medians, "ratios": ratios})
        print(rows[-1], flush=True)
    return rows


def seconds_tables(rows: list[dict[str, Any]]) -> dict[str, Table]:
    lines = []
    for row in rows:
        line = [row["optimizer"], str(row["rounds"]), f"{row['ms']['plain']:.0f}"]
        for arm in ("approximate", "exact"):
            ratio, low, high = row["ratios"][arm]
            line.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        lines.append(line)
    header = ["optimizer", "rounds", "plain ms per step", "with weights / plain"]
    return {"time": ([*header, "exact=True / plain"], lines)}


# --- all ------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Table]]]] = {
    "quality": (quality, quality_tables),
    "operations": (operations, operations_tables),
    "memory": (memory, memory_tables),
    "time": (seconds, seconds_tables),
}


def page(found: dict[str, Any]) -> list[Part]:
    """Tables of all parts with their titles; below those of a part, how it was measured."""
    made: list[Part] = []
    for part in (each for each in PARTS if each in found):
        record = found[part]["environment"]
        for name, table in PARTS[part][1](found[part]["results"]).items():
            made += [f"### {name}", table]
        made.append(f"`{record['command']}`: {describe(record)}")
    return made


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("tokens.py", __doc__)
    add = parser.add_argument
    add("--text", type=Path, help="text file")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--vocabularies", nargs="+", type=positive, help="only these")
    add("--steps", type=positive, help="training steps, for a quick run")
    add("--tokens", nargs="+", type=positive, default=[256, 1024, 4096, 16_384])
    add("--sequences", nargs="+", type=positive, default=[1, 2, 8, 16], help="for `memory`")
    add("--seconds", type=float, default=60.0, help="for each row of `time`")
    args = parser.parse_args(argv)
    args.settings = [
        each
        for each in SETTINGS
        if args.vocabularies is None or each.vocabulary in args.vocabularies
    ]
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    with use_threads(1):
        text = read_text(args.text)
        for part in args.parts:
            report = Report("tokens.py", argv, args.out)
            rows = PARTS[part][0](text, args)
            if part == "quality" and args.vocabularies is not None:
                others = found.get(part, {}).get("results", [])
                rows += [row for row in others if row["vocabulary"] not in args.vocabularies]
            found[part] = {"environment": report.finish(), "results": rows}
            report.write(found, *page(found))
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
