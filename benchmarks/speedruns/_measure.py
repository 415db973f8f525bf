"""What both speedruns share: a clock without evaluations, time to a target, tables, files."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import primum
from primum.experiments.files import write_text


@dataclass
class Curve:
    """Evaluations of one run: steps taken, seconds of training, and what was measured."""

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
    """Seconds of training. Waits for the device when it starts and stops, and never in between."""

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
    """`base`: nothing. Otherwise the arm is a radius."""
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
    """Arms, seeds, device and file."""
    parser.add_argument("--arms", nargs="+", default=list(arms), metavar="ARM",
                        help="base, or a radius (%(default)s)")  # fmt: skip
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="seeds (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--target", type=float, metavar="X", help="count steps and seconds to it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true",
                        help="the model, and primum's solver")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help="(%(default)s)")


def check_arms(parser: argparse.ArgumentParser, arms: Sequence[str]) -> None:
    """Exit with a message for an arm that is neither base nor a radius."""
    for arm in arms:
        if arm != "base" and not _is_radius(arm):
            parser.error(f"an arm is base or a radius >= 0, got {arm!r}")


def _is_radius(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def peak_memory(device: torch.device) -> int | None:
    """Most bytes held on a GPU since the last reset; None elsewhere."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


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
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _missing(own: Sequence[Run], reached: Sequence[object]) -> str:
    return f" ({len(reached)} of {len(own)})" if 0 < len(reached) < len(own) else ""


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def write(path: Path, script: str, argv: Sequence[str] | None, runs: Sequence[Run]) -> None:
    """Everything that is to be reported, as JSON; rewritten after every run."""
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
