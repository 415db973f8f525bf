"""Losses fused with the head: memory, FLOPs and time of forward and backward.

    called        cross_entropy(head(hidden), targets): the logits of all tokens in memory
    hook          the same with `primum.attach`, per token
    torch         F.linear_cross_entropy in chunks (torch 2.13 and later)
    primum        `reducer.linear_cross_entropy`
    paused        the same without weights, inside `reducer.paused()`

A head without bias under AdamW, in float32. Memory is the peak of torch's CPU allocator over what
it held before: it includes gradients, but not hidden states, weight and optimizer state. Operations
are those of matrix products, in units of N H for N tokens and a head of H entries; they are counted
on `--count` tokens, with primum's custom operators replaced by plain functions. Time is the median
process time on one thread; arms take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from _common import Report, clock_for, count_flops, make_parser, positive, take_turns, use_threads
from overhead import peak_memory
from torch import Tensor, nn

import primum
from primum import fused_op

ARMS = ("called", "hook", "torch", "primum", "paused")
MIB = 1 << 20


class Case:
    """A head in the middle of training, and a batch of hidden states."""

    def __init__(self, tokens: int, width: int, words: int) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(width, words, bias=False)
        self.hidden = torch.randn(tokens, width, requires_grad=True)
        self.targets = torch.randint(words, (tokens,))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-3)
        weight = self.head.weight
        moments = {"exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        scaled = {name: 1e-4 * value for name, value in moments.items()}
        self.optimizer.state[weight] = {"step": torch.tensor(9.0), **scaled}

    def clear(self) -> None:
        self.hidden.grad = self.head.weight.grad = None

    def run(self, arm: str) -> None:
        """Forward and backward."""
        self.clear()
        if arm in ("called", "torch"):
            self._loss(arm).backward()
            return
        with primum.attach(self.head, self.optimizer, per="token", radius=0.1) as reducer:
            if arm == "paused":
                with reducer.paused():
                    reducer.linear_cross_entropy(self.hidden, self.targets).backward()
                return
            if arm == "hook":
                self._loss("called").backward()
            else:
                reducer.linear_cross_entropy(self.hidden, self.targets).backward()
            assert reducer.last is not None
            assert reducer.last.applied

    def _loss(self, arm: str) -> Tensor:
        if arm == "called":
            return F.cross_entropy(self.head(self.hidden), self.targets)
        return F.linear_cross_entropy(
            self.hidden, self.head.weight, self.targets, options=nn.LinearCrossEntropyOptions()
        )


def operations(case: Case, arm: str) -> float | None:
    """FLOPs of matrix products in units of N H; None for torch's operator, which hides them."""
    if arm == "torch":
        return None
    with opened(), count_flops() as counter:
        case.run(arm)
    units = case.hidden.shape[0] * case.head.weight.numel()
    return float(counter.get_total_flops()) / units


@contextmanager
def opened() -> Iterator[None]:
    """Replace our operators by plain functions, so that the FLOPs inside are counted."""
    with (
        mock.patch.object(fused_op, "token_losses", fused_op.losses_of),
        mock.patch.object(fused_op, "token_gradients", fused_op.gradients_of),
    ):
        yield


def measure(
    tokens: int, width: int, words: int, args: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    arms = [arm for arm in args.arms if arm != "torch" or hasattr(F, "linear_cross_entropy")]
    few = Case(min(args.count, tokens), width, words)
    counted = {arm: operations(few, arm) for arm in arms}
    case = Case(tokens, width, words)
    runs: list[Callable[[], None]] = [partial(case.run, arm) for arm in arms]
    peaks = []
    for run in runs:
        case.clear()  # gradients of the last run, freed during this one, would hide its peak
        peaks.append(peak_memory(run) / MIB)
    times = take_turns(runs, args.seconds, args.repeats, clock=clock_for(1))
    return {
        arm: {
            "operations": counted[arm],
            "peak_mib": peak,
            "seconds": median(seconds) if seconds else None,
        }
        for arm, peak, seconds in zip(arms, peaks, times, strict=True)
    }


HEADER = [
    "vocabulary", "width", "tokens", "loss", "peak MiB", "over torch %", "operations / NH", "s",
]  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for each in results:
        arms = each["arms"]
        torchs = arms.get("torch", {}).get("peak_mib")
        for arm, found in arms.items():
            above = "" if torchs is None else f"{100 * (found['peak_mib'] / torchs - 1):+.0f}"
            made = "" if found["operations"] is None else f"{found['operations']:.1f}"
            sizes = [f"{each['words']:,}", str(each["width"]), f"{each['tokens']:,}"]
            time = "" if found["seconds"] is None else f"{found['seconds']:.1f}"
            rows.append([*sizes, arm, f"{found['peak_mib']:.0f}", above, made, time])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("fused.py", __doc__)
    add = parser.add_argument
    add("--words", nargs="+", type=positive, default=[32_000], help="vocabularies")
    add("--width", type=positive, default=768)
    add("--tokens", nargs="+", type=positive, default=[1024, 4096])
    add("--arms", nargs="+", choices=ARMS, default=ARMS)
    add("--count", type=positive, default=1024, help="tokens on which FLOPs are counted")
    add("--repeats", type=int, default=3, help="0 to skip timing")
    add("--seconds", type=float, default=120.0, help="time budget per size")
    args = parser.parse_args(argv)
    results = []
    with use_threads(1):
        report = Report("fused.py", argv, args.out)
        for words in args.words:
            for tokens in args.tokens:
                arms = measure(tokens, args.width, words, args)
                results.append(
                    {"words": words, "width": args.width, "tokens": tokens, "arms": arms}
                )
    report.save({"results": results}, (HEADER, table(results)))
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
