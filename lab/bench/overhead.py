"""Time and memory of a training step with and without primum.

First, the time that primum, the paper's recipe and UPGrad add to a step on the same small heads.

Two copies of a model train on the same batch and take turns, one step each, in alternating order.
Time is measured in two ways:

- side by side: ratio of the median step times, with a 95% bootstrap interval over the pairs. It
  includes everything, also the noise of the machine.
- stopwatch: hooks on the head's output, around primum's own, measure the time that primum takes in
  each step; its ratio is `step / (step - that time)`. The noise of the backbone cancels.

On one thread, the default, time is process time, which other processes hardly affect. With more
threads it is wall time and needs an idle machine; a backbone gains more from them than primum's
small operations, so the ratio grows.

Memory is the peak of torch's CPU allocator from before `attach` to after the first steps, computed
from the allocator's events (`torch.profiler` with `profile_memory`). Unlike the resident size of
the process, it is the same in every run. It includes what primum keeps between steps, but not
parameters and batch.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from tqdm import tqdm

import primum
from lab import callbacks
from lab.bench._common import (
    Report,
    clock_for,
    make_parser,
    parse_quick,
    positive,
    ratio_of_medians,
    take_turns,
    use_threads,
)
from lab.bench._rivals import HEADER as RIVALS_HEADER
from lab.bench._rivals import Rivals, measure_rivals, verdict
from primum.kernel import builder
from primum.kernel.gram import Dense, Gram, MatrixFree, choose_form

GOAL, GOAL_BATCH = 1.02, 128  # at most this ratio on the real backbone at this batch size
BACKBONES = ("tiny", "real")
OPTIMIZERS = ("sgd", "adamw")
FULL: dict[str, Any] = {
    "heads": [(64, 10), (64, 100), (384, 100), (768, 200)],
    "batches": [128, 512, 1024],
    "seconds": 540.0,
    "repeats": 200,
}
QUICK: dict[str, Any] = {
    "heads": [(64, 10), (384, 100)],
    "batches": [128],
    "seconds": 60.0,
    "repeats": 40,
}
HEADER = [
    "backbone", "optimizer", "head", "batch", "Gram", "plain ms", "with ms", "added ms", "ratio",
    "95% interval", "stopwatch ms", "ratio", "memory MiB", "added KiB", "pairs",
]  # fmt: skip
LEAST_PAIRS = 3  # for an interval


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    backbone: str
    optimizer: str
    inputs: int
    outputs: int
    batch: int

    @property
    def warm_up(self) -> int:
        """Steps before timing starts. Only the second one finds optimizer state."""
        return 1 if self.backbone == "real" and self.batch > GOAL_BATCH else 2

    @property
    def share(self) -> float:
        """Share of the time budget, relative to the other cases."""
        return 1.0 if self.backbone == "tiny" else 8.0 + self.batch / 128


@dataclass(frozen=True)
class Result:
    """Measurements of one case: medians in milliseconds, memory in bytes."""

    case: Case
    route: str
    pairs: int
    plain_ms: float
    attached_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    stopwatch_ms: float
    stopwatch_ratio: float
    plain_peak_bytes: int
    attached_peak_bytes: int

    @property
    def added_ms(self) -> float:
        return self.attached_ms - self.plain_ms

    @property
    def added_bytes(self) -> int:
        return self.attached_peak_bytes - self.plain_peak_bytes

    @property
    def interval(self) -> str:
        if self.pairs < LEAST_PAIRS:
            return "too few pairs"
        return f"{self.ratio_low:.3f} to {self.ratio_high:.3f}"

    def cells(self) -> list[str]:
        case = self.case
        return [
            case.backbone,
            case.optimizer,
            f"{case.inputs}x{case.outputs}",
            str(case.batch),
            self.route,
            f"{self.plain_ms:.2f}",
            f"{self.attached_ms:.2f}",
            f"{self.added_ms:+.2f}",
            f"{self.ratio:.3f}",
            self.interval,
            f"{self.stopwatch_ms:.2f}",
            f"{self.stopwatch_ratio:.3f}",
            f"{self.plain_peak_bytes / 2**20:.2f}",
            f"{self.added_bytes / 2**10:+.1f}",
            str(self.pairs),
        ]


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        return nn.functional.relu(self.main(images) + self.shortcut(images), inplace=True)


class Model(nn.Module):
    """A backbone and the linear head that primum works on."""

    def __init__(self, backbone: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(inputs, outputs)

    def forward(self, batch: Tensor) -> Tensor:
        """Images [B, 3, 32, 32] or vectors [B, 32] -> logits [B, outputs]."""
        logits: Tensor = self.head(self.backbone(batch))
        return logits


def resnet20(width: int) -> nn.Module:
    """The backbone of a ResNet-20 with group norm, its 64 features widened by a linear layer."""
    blocks: list[nn.Module] = []
    inputs = 16
    for outputs, stride in [(16, 1), (32, 2), (64, 2)]:
        for block in range(3):
            blocks.append(Block(inputs, outputs, stride if block == 0 else 1))
            inputs = outputs
    widen = [] if width == 64 else [nn.Linear(64, width), nn.ReLU(inplace=True)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *widen,
    )


def build(case: Case) -> tuple[Model, Tensor, Tensor]:
    """Model, a batch and its labels."""
    torch.manual_seed(0)
    if case.backbone == "tiny":
        backbone: nn.Module = nn.Sequential(nn.Linear(32, case.inputs), nn.ReLU())
        batch = torch.randn(case.batch, 32)
    else:
        # The faster layout for convolutions on a CPU, and so the harder test.
        layout: Any = {"memory_format": torch.channels_last}  # torch's stubs do not know it
        backbone = resnet20(case.inputs).to(**layout)
        batch = torch.randn(case.batch, 3, 32, 32).to(**layout)
    labels = torch.randint(case.outputs, (case.batch,))
    return Model(backbone, case.inputs, case.outputs).train(), batch, labels


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)


class Arm:
    """A model in training, plain or with primum attached, and a stopwatch for primum's share.

    Both arms have the stopwatch, so that its few microseconds cancel.
    """

    def __init__(
        self, model: Model, kind: str, batch: Tensor, labels: Tensor, clock: Callable[[], float]
    ) -> None:
        self.model, self.batch, self.labels, self.clock = model, batch, labels, clock
        self.optimizer = optimizer_of(kind, model)
        self.held_up: list[float] = []
        self._started = 0.0

    def install(self, attached: bool) -> None:
        """Register hooks on the output; they run in order: start, primum's, stop."""
        head = self.model.head
        if attached:
            primum.attach(self.model, self.optimizer)
        head.register_forward_hook(self._before, prepend=True)
        head.register_forward_hook(self._after)

    def step(self) -> None:
        """One ordinary training step."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.batch), self.labels)
        loss.backward()
        self.optimizer.step()

    def _before(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output.register_hook(self._start)
        self.held_up.append(0.0)
        self._start()

    def _after(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._stop()
        output.register_hook(self._stop)

    def _start(self, gradient: Tensor | None = None) -> None:
        self._started = self.clock()

    def _stop(self, gradient: Tensor | None = None) -> None:
        self.held_up[-1] += self.clock() - self._started


@contextmanager
def without_stderr() -> Iterator[None]:
    """Silence stderr: the profiler prints to it from C++, which would break the progress bar."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def peak_memory(run: Callable[[], object]) -> int:
    """Peak bytes of torch's CPU allocator during `run`, without the profiler's messages."""
    with without_stderr():
        return callbacks.peak_memory(run)


def first_steps(arm: Arm, attached: bool, count: int) -> None:
    arm.install(attached)
    for _ in range(count):
        arm.step()


def measure(case: Case, seconds: float, repeats: int) -> Result:
    """Measure both arms of one case, in about `seconds` at most."""
    begin = perf_counter()
    model, batch, labels = build(case)
    clock = clock_for(torch.get_num_threads())
    arms = [Arm(copy.deepcopy(model), case.optimizer, batch, labels, clock) for _ in range(2)]
    plain, attached = arms
    routes: set[str] = set()

    def choose(factors: MatrixFree, products: int) -> Gram:
        chosen = choose_form(factors, products)
        routes.add("dense" if isinstance(chosen, Dense) else "matrix-free")
        return chosen

    with mock.patch.object(builder, "choose_form", choose):  # records which route is taken
        peaks = [
            peak_memory(partial(first_steps, arm, arm is attached, case.warm_up)) for arm in arms
        ]
    for arm in arms:
        arm.held_up.clear()
    left = seconds - (perf_counter() - begin)
    without, with_it = take_turns([plain.step, attached.step], left, repeats, clock=clock)
    ratio, low, high = ratio_of_medians(with_it, without)
    shares = [t / (t - held) for t, held in zip(with_it, attached.held_up, strict=True)]
    return Result(
        case=case,
        route=" and ".join(sorted(routes)) or "none",
        pairs=len(without),
        plain_ms=1e3 * median(without),
        attached_ms=1e3 * median(with_it),
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        stopwatch_ms=1e3 * median(attached.held_up),
        stopwatch_ratio=median(shares),
        plain_peak_bytes=peaks[0],
        attached_peak_bytes=peaks[1],
    )


def verdicts(results: Sequence[Result]) -> list[str]:
    """One line each: whether the goal is met, and how much memory is added."""
    lines = []
    goal = [r for r in results if r.case.backbone == "real" and r.case.batch == GOAL_BATCH]
    if goal:
        worst = max(goal, key=lambda r: r.stopwatch_ratio)
        met = "met" if worst.stopwatch_ratio <= GOAL else "NOT met"
        lines.append(
            f"Goal, at most {GOAL}x on the real backbone at batch {GOAL_BATCH}: {met} by the "
            f"stopwatch, worst {worst.stopwatch_ratio:.4f}."
        )
        worst = max(goal, key=lambda r: r.ratio)
        timed = [r for r in goal if r.pairs >= LEAST_PAIRS]
        below = sum(r.ratio_high <= GOAL for r in timed)
        above = sum(r.ratio_low > GOAL for r in timed)
        lines.append(
            f"Side by side, {below} of {len(goal)} cases lie below {GOAL} with their whole "
            f"interval, {above} above, {len(goal) - below - above} cannot be told from the noise; "
            f"worst {worst.ratio:.3f} ({worst.interval})."
        )
    for backbone in BACKBONES:
        some = [r for r in results if r.case.backbone == backbone]
        if some:
            worst = max(some, key=lambda r: r.added_bytes / r.plain_peak_bytes)
            lines.append(
                f"Peak memory, {backbone} backbone: at most "
                f"{100 * worst.added_bytes / worst.plain_peak_bytes:+.2f}% "
                f"({worst.added_bytes / 2**10:+.1f} KiB on {worst.plain_peak_bytes / 2**20:.1f} "
                "MiB)."
            )
    return lines


def run(
    cases: Sequence[Case],
    seconds: float,
    repeats: int,
    keep: Callable[[list[Result], list[Case]], None],
) -> None:
    """Measure case by case; `keep` is called with the results so far and the missing cases."""
    deadline = perf_counter() + seconds
    results: list[Result] = []
    skipped: list[Case] = []
    bar = tqdm(cases, desc="cases", unit="case", file=sys.stderr, dynamic_ncols=True)
    for index, case in enumerate(bar):
        bar.set_postfix_str(
            f"{case.backbone} {case.optimizer} {case.inputs}x{case.outputs} B={case.batch}"
        )
        left = deadline - perf_counter()
        if left <= 0:
            skipped.append(case)
            continue
        share = case.share / sum(other.share for other in cases[index:])
        results.append(measure(case, left * share, repeats))
        keep(results, [*skipped, *cases[index + 1 :]])


def save(
    report: Report,
    rivals: Sequence[Rivals],
    results: Sequence[Result],
    missing: Sequence[Case],
) -> None:
    """Write the results so far, so that a run can be stopped."""
    derived = [
        asdict(r) | {"added_ms": r.added_ms, "added_peak_bytes": r.added_bytes} for r in results
    ]
    said = [verdict(rivals), *verdicts(results)]
    if missing:
        said.append(f"{len(missing)} cases are missing: out of time (--seconds), or stopped.")
    content = {
        "goal": {"ratio": GOAL, "backbone": "real", "batch": GOAL_BATCH},
        "verdicts": said,
        "recipes": [each.as_dict() for each in rivals],
        "results": derived,
        "missing": [asdict(case) for case in missing],
    }
    tables = (RIVALS_HEADER, [r.cells() for r in rivals]), (HEADER, [r.cells() for r in results])
    report.save(content, *tables, said)


def parse_head(text: str) -> tuple[int, int]:
    """`64x10` -> inputs and outputs."""
    inputs, _, outputs = text.partition("x")
    if not (inputs.isdigit() and outputs.isdigit() and int(inputs) and int(outputs)):
        raise argparse.ArgumentTypeError(f"a head is written like 64x10, got {text!r}")
    return int(inputs), int(outputs)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("overhead.py", __doc__, quick="fewer cases and steps, one minute")
    add = made.add_argument
    add("--heads", nargs="+", type=parse_head, metavar="INxOUT", help="such as 64x10 384x100")
    add("--batches", nargs="+", type=positive, metavar="B", help="batch sizes")
    add("--backbones", nargs="+", choices=BACKBONES, default=BACKBONES, help="default: both")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS, help="default: both")
    add("--seconds", type=float, help="time budget for all cases (default: 540)")
    add("--repeats", type=positive, help="maximum pairs of steps per case (default: 200)")
    add("--threads", type=positive, default=1, help="torch threads (default: 1)")
    return parse_quick(made, argv, FULL, QUICK)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    grid = product(options.backbones, sorted(options.batches), options.heads, options.optimizers)
    cases = [
        Case(backbone, optimizer, head[0], head[1], batch)
        for backbone, batch, head, optimizer in grid
    ]
    with use_threads(options.threads):
        report = Report("overhead.py", argv, options.out)
        measure(replace(cases[0], backbone="tiny"), 0, 2)  # the first use of anything is slow
        rivals = measure_rivals(options.seconds / 4, options.repeats)
        run(cases, options.seconds, options.repeats, partial(save, report, rivals))
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
