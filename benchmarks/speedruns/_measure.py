"""Shared by both speedruns: a clock without evaluations, time to a target, all runs, a table."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import primum
from primum.experiments.files import write_text
from primum.experiments.text_tables import text_table


@dataclass
class Curve:
    """Evaluations of one run: steps, seconds of training, and the metric."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, value: float) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.values.append(value)


@dataclass
class Run:
    """One run of one arm. `reached` is the first evaluation at the target, as step and seconds."""

    arm: str
    seed: int
    final: float
    curve: Curve
    reached: tuple[int, float] | None
    ms_per_step: float
    peak_bytes: int | None
    fallbacks: int


class Clock:
    """Seconds of training. Synchronizes with the device at start and stop, never in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._wait()
        self._since = perf_counter()

    def stop(self) -> float:
        self._wait()
        if self._since is not None:
            self.seconds += perf_counter() - self._since
            self._since = None
        return self.seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def attach(
    arm: str, model: nn.Module, optimizer: Optimizer, *, per: str, compiled: bool
) -> primum.Reducer | None:
    """Attach primum with the arm as its radius; nothing for `base`."""
    if arm == "base":
        return None
    return primum.attach(model, optimizer, radius=float(arm), per=per, compile=compiled)


def first_reached(curve: Curve, target: float | None, *, higher: bool) -> tuple[int, float] | None:
    """Step and seconds of the first evaluation at the target or beyond it."""
    for step, seconds, value in zip(curve.steps, curve.seconds, curve.values, strict=True):
        if target is not None and (value >= target if higher else value <= target):
            return step, seconds
    return None


def add_options(parser: argparse.ArgumentParser, arms: Sequence[str], out: str) -> None:
    """Add options for arms, seeds, target, device, precision and file."""
    parser.add_argument("--arms", type=_arm, nargs="+", default=list(arms), metavar="ARM",
                        help="base, or a radius (%(default)s)")  # fmt: skip
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="seeds (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--target", type=float, metavar="X", help="measure steps and time to it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true",
                        help="compile the model and primum's solver")  # fmt: skip
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help="(%(default)s)")


def _arm(text: str) -> str:
    """`base` or a radius, as a type for argparse."""
    with suppress(ValueError):
        if text == "base" or 0 <= float(text) < math.inf:
            return text
    raise argparse.ArgumentTypeError(f"an arm is base or a radius >= 0, got {text!r}")


def precision(options: argparse.Namespace) -> AbstractContextManager[object]:
    """Autocast to bfloat16, or nothing."""
    if options.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(options.device).type, dtype=torch.bfloat16)


def finished(
    arm: str,
    seed: int,
    final: float,
    curve: Curve,
    reducer: primum.Reducer | None,
    options: argparse.Namespace,
    *,
    higher: bool,
) -> Run:
    """The record of a run that has ended; detaches primum."""
    device = torch.device(options.device)
    last = None if reducer is None else reducer.last
    if reducer is not None:
        reducer.remove()
    return Run(
        arm,
        seed,
        final,
        curve,
        first_reached(curve, options.target, higher=higher),
        1e3 * curve.seconds[-1] / curve.steps[-1],
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        0 if last is None else int(last.fallbacks),
    )


def run_all(
    train: Callable[[str, int, argparse.Namespace], Run],
    options: argparse.Namespace,
    short: Mapping[str, int],
    script: str,
    argv: Sequence[str] | None,
    metric: str,
    *,
    scale: float = 1.0,
) -> None:
    """Train all arms in turn, seed by seed; write the runs after each one, then print a table.

    `short` are the options of a warm-up, so that kernels are chosen and compiled before timing.
    """
    if torch.device(options.device).type == "cuda" or options.compile:
        for arm in options.arms:
            train(arm, options.first_seed, argparse.Namespace(**vars(options) | short))
    runs: list[Run] = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        for arm in options.arms:
            runs.append(train(arm, seed, options))
            print(f"{arm}, seed {seed}: {metric} {scale * runs[-1].final:.4f}", flush=True)
            write(options.out, script, argv, runs)
    print(f"\n{table(runs, metric, scale=scale)}\n\nRuns: {options.out.name}")


def table(runs: Sequence[Run], metric: str, *, scale: float = 1.0) -> str:
    """One row per arm: mean and standard deviation over seeds."""
    rows = [["arm", "runs", metric, "steps to target", "seconds to target", "ms/step"]]
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        reached = [run.reached for run in own if run.reached is not None]
        rows.append([
            arm, str(len(own)), _spread([scale * run.final for run in own], 3),
            _spread([step for step, _ in reached], 0) + _missing(own, reached),
            _spread([seconds for _, seconds in reached], 2),
            _spread([run.ms_per_step for run in own], 2),
        ])  # fmt: skip
    return text_table(rows, left=len(rows[0]))


def _missing(own: Sequence[Run], reached: Sequence[object]) -> str:
    return f" ({len(reached)} of {len(own)})" if 0 < len(reached) < len(own) else ""


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def write(path: Path, script: str, argv: Sequence[str] | None, runs: Sequence[Run]) -> None:
    """Write all runs so far as JSON, with command and versions."""
    words = list(sys.argv[1:] if argv is None else argv)
    cuda = torch.cuda.is_available()
    content: dict[str, Any] = {
        "format": "primum-speedrun-1",
        "command": shlex.join(["python", f"benchmarks/speedruns/{script}", *words]),
        "environment": {
            "primum": primum.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "cuda": torch.version.cuda,
        },
        "runs": [asdict(run) for run in runs],
    }
    write_text(path, json.dumps(content, indent=1) + "\n")
