"""Which Gram route is faster, and does the library's cost model pick it?

Times both exact forms of the Gram operator over many sizes: dense (build, then B x B products) and
matrix-free (products of the head's size), each applied as often as by the default solver. Regret
is the time of the route that `primum.gram.operations` picks, divided by that of the faster one; 1
is perfect. Then it fits the constants of a model of the same form and reports what would change.

A route is not run if its arithmetic alone would take more than `HOPELESS` times as long as the
other route; this lower bound then serves as its time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from _common import Report, clock_for, make_parser, parse_quick, positive, take_turns, use_threads
from tqdm import tqdm

from primum.gram import Gram, MatrixFree, operations
from primum.recipe import Primum

PRODUCTS = Primum().products  # its iterations and the start
HOPELESS = 10
CLEARLY_BETTER = 0.02  # of mean regret: a fit that saves less is not worth another constant
FULL: dict[str, Any] = {
    "batches": [32, 64, 128, 256, 512, 1024, 2048, 4096],
    "inputs": [64, 384, 768],
    "outputs": [10, 100, 1000],
    "positions": [16, 128],
    "seconds": 420.0,
    "repeats": 50,
}
QUICK: dict[str, Any] = {
    "batches": [32, 256, 1024],
    "inputs": [64, 384],
    "outputs": [10, 100],
    "positions": [16],
    "seconds": 30.0,
    "repeats": 10,
}
HEADER = ["gain", "T", "head", "batch", "dense ms", "free ms", "faster", "picked", "regret"]


@dataclass(frozen=True)
class Case:
    """One size. `inputs` counts the column of ones for the bias."""

    batch: int
    positions: int
    inputs: int
    outputs: int
    elementwise: bool

    @property
    def factorises(self) -> bool:
        return not self.elementwise and self.positions == 1

    @property
    def picks_dense(self) -> bool:
        dense, free = operations(
            self.batch,
            self.positions,
            self.inputs,
            self.outputs,
            products=PRODUCTS,
            factorises=self.factorises,
        )
        return dense <= free

    @property
    def flops(self) -> tuple[float, float]:
        """Arithmetic of the matrix products of both routes: dense, matrix-free."""
        square, rows, size = self.batch**2, self.batch * self.positions, self.inputs * self.outputs
        if self.factorises:
            dense = 2 * square * (self.inputs + self.outputs)
        else:
            dense = 2 * square * size + (2 * rows * size if self.positions > 1 else 0)
        return dense, PRODUCTS * 4 * rows * size


@dataclass(frozen=True)
class Constants:
    """A cost model, in units of one floating-point operation of a matrix product.

    Attributes:
        entry: Cost of reading or writing one entry.
        passes: Passes over features and output gradients in one matrix-free product.
        launch: Overhead of one more operation.
    """

    entry: float
    passes: float
    launch: float

    def pick_dense(self, case: Case) -> bool:
        square, rows = case.batch**2, case.batch * case.positions
        width, size = case.inputs + case.outputs, case.inputs * case.outputs
        if case.factorises:
            build = square * (2 * width + 2 * self.entry)
        else:
            build = 2 * case.batch * size * (case.positions + case.batch + self.entry)
        dense = build + PRODUCTS * (self.entry * square + self.launch)
        free = rows * (4 * size + self.passes * self.entry * width) + 6 * self.launch
        return dense <= PRODUCTS * free


@dataclass(frozen=True)
class Result:
    """Median milliseconds of both routes in one case; bounded: that time is a lower bound."""

    case: Case
    dense_ms: float
    free_ms: float
    dense_bounded: bool
    free_bounded: bool
    rounds: int

    @property
    def dense_is_faster(self) -> bool:
        return self.dense_ms <= self.free_ms

    def regret(self, picks_dense: bool) -> float:
        picked = self.dense_ms if picks_dense else self.free_ms
        return picked / min(self.dense_ms, self.free_ms)

    def cells(self) -> list[str]:
        case = self.case
        return [
            "elementwise" if case.elementwise else "uniform",
            str(case.positions),
            f"{case.inputs - 1}x{case.outputs}",
            str(case.batch),
            f"{'>' if self.dense_bounded else ''}{self.dense_ms:.2f}",
            f"{'>' if self.free_bounded else ''}{self.free_ms:.2f}",
            "dense" if self.dense_is_faster else "free",
            "dense" if case.picks_dense else "free",
            f"{self.regret(case.picks_dense):.2f}",
        ]


def build(case: Case) -> tuple[MatrixFree, torch.Tensor]:
    """A head of that size and a vector to multiply."""
    torch.manual_seed(0)
    rows = (case.batch,) if case.positions == 1 else (case.batch, case.positions)
    gain = torch.rand(case.outputs, case.inputs) + 0.5 if case.elementwise else 1.0
    head = MatrixFree(torch.randn(*rows, case.inputs), torch.randn(*rows, case.outputs), gain)
    return head, torch.rand(case.batch)


def routes(case: Case) -> list[Callable[[], None]]:
    """The dense and the matrix-free route, as the solver uses them."""
    head, vector = build(case)

    def apply(operator: Gram) -> None:
        operator.diagonal.reciprocal()
        for _ in range(PRODUCTS):
            operator.times(vector)

    def fresh() -> MatrixFree:
        return MatrixFree(head.features, head.output_gradients, head.gain)

    def dense() -> None:
        apply(fresh().dense())

    def free() -> None:
        apply(fresh())

    return [dense, free]


def measure(case: Case, seconds: float, repeats: int, flops_per_second: float) -> Result:
    """Time both routes in turn, in about `seconds` at most; skip a hopeless one."""
    begin = perf_counter()
    clock = clock_for(torch.get_num_threads())
    both = routes(case)
    least = [flops / flops_per_second for flops in case.flops]
    first = min((0, 1), key=lambda route: least[route])
    start = clock()
    both[first]()
    warm = clock() - start
    skip = least[1 - first] > HOPELESS * warm
    left = seconds - (perf_counter() - begin)
    running = [first] if skip else [0, 1]
    if not skip and least[1 - first] < seconds / 10:
        both[1 - first]()  # warm up as well
    times = take_turns([both[route] for route in running], left, repeats, clock=clock)
    spent = {route: median(values) for route, values in zip(running, times, strict=True)}
    return Result(
        case=case,
        dense_ms=1e3 * spent.get(0, least[0]),
        free_ms=1e3 * spent.get(1, least[1]),
        dense_bounded=0 not in spent,
        free_bounded=1 not in spent,
        rounds=len(times[0]),
    )


def peak_flops(size: int = 1024) -> float:
    """Floating-point operations per second of a large matrix product."""
    clock = clock_for(torch.get_num_threads())
    left, right = torch.randn(size, size), torch.randn(size, size)
    (times,) = take_turns([lambda: left @ right], 5.0, 10, clock=clock)
    return 2 * size**3 / min(times)


def fit(results: Sequence[Result]) -> Constants:
    """The constants with the least mean regret; among those within 0.1%, the least worst case."""
    tried = []
    for values in product((4, 8, 16, 32), range(0, 13, 2), (5e4, 1e5, 2e5, 4e5, 8e5)):
        constants = Constants(*values)
        regrets = [r.regret(constants.pick_dense(r.case)) for r in results]
        tried.append((fmean(regrets), max(regrets), constants))
    best = min(tried, key=lambda each: each[0])[0]
    return min((each for each in tried if each[0] <= best + 1e-3), key=lambda each: each[1])[2]


def summarise(results: Sequence[Result], fitted: Constants) -> dict[str, Any]:
    """Regret of the library's constants and of the fitted ones."""
    groups = {
        "all": results,
        "uniform gain": [r for r in results if r.case.factorises],
        "elementwise gain": [r for r in results if r.case.elementwise and r.case.positions == 1],
        "sequences": [r for r in results if r.case.positions > 1],
    }
    summary: dict[str, Any] = {}
    for name, members in groups.items():
        if members:
            now = [r.regret(r.case.picks_dense) for r in members]
            then = [r.regret(fitted.pick_dense(r.case)) for r in members]
            summary[name] = {
                "cases": len(members),
                "mean": fmean(now),
                "worst": max(now),
                "fitted_mean": fmean(then),
                "fitted_worst": max(then),
            }
    return summary


def lines(summary: dict[str, Any], fitted: Constants) -> list[str]:
    """The summary as sentences."""
    said = [
        f"Regret, {name} ({s['cases']} cases): mean {s['mean']:.3f}, worst {s['worst']:.2f}; "
        f"fitted: mean {s['fitted_mean']:.3f}, worst {s['fitted_worst']:.2f}."
        for name, s in summary.items()
    ]
    saved = summary["all"]["mean"] - summary["all"]["fitted_mean"]
    better = "clearly better" if saved > CLEARLY_BETTER else "no clear gain"
    said.append(
        f"Fit ({better}): an entry costs {fitted.entry:g} floating-point operations, a launch "
        f"{fitted.launch:,.0f}, a matrix-free product passes {fitted.passes:g} times over features "
        "and output gradients."
    )
    return said


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("routes.py", __doc__, quick="fewer sizes, half a minute")
    add = made.add_argument
    add("--batches", nargs="+", type=positive, metavar="B", help="batch sizes")
    add("--inputs", nargs="+", type=positive, metavar="D", help="input widths of the head")
    add("--outputs", nargs="+", type=positive, metavar="K", help="output widths of the head")
    add("--positions", nargs="*", type=positive, metavar="T", help="sequence lengths")
    add("--seconds", type=float, help="time budget for all cases (default: 420)")
    add("--repeats", type=positive, help="maximum rounds per case (default: 50)")
    add("--threads", type=positive, default=1, help="torch threads (default: 1)")
    return parse_quick(made, argv, FULL, QUICK)


def sizes(options: argparse.Namespace) -> list[Case]:
    """Single vectors in all sizes, sequences in the smaller ones; each with both kinds of gain."""
    cases = [
        Case(batch, 1, inputs + 1, outputs, elementwise)
        for elementwise, inputs, outputs, batch in product(
            (False, True), options.inputs, options.outputs, options.batches
        )
    ]
    cases += [
        Case(batch, positions, inputs + 1, outputs, elementwise)
        for elementwise, positions, inputs, outputs, batch in product(
            (False, True),
            options.positions,
            options.inputs[:2],
            options.outputs,
            options.batches[::-2],
        )
        if batch * positions <= 32_768
    ]
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = []
    with use_threads(options.threads):
        report = Report("routes.py", argv, options.out)
        rate = report.record["peak_flops_per_second"] = peak_flops()
        cases = sizes(options)
        bar = tqdm(cases, desc="sizes", unit="size", file=sys.stderr, dynamic_ncols=True)
        for index, case in enumerate(bar):
            left = max(0.0, options.seconds - report.seconds)
            share = 3 * left / (len(cases) - index)  # small cases do not need theirs
            results.append(measure(case, share, options.repeats, rate))
    fitted = fit(results)
    summary = summarise(results, fitted)
    report.save(
        {
            "products": PRODUCTS,
            "summary": summary,
            "fit": asdict(fitted),
            "results": [
                asdict(r) | {"picked": "dense" if r.case.picks_dense else "matrix-free"}
                for r in results
            ],
        },
        (HEADER, [r.cells() for r in results]),
        lines(summary, fitted),
    )
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
