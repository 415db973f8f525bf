"""The paper's Tables 3 and 4: time and memory of the Gram matrix, and of our default route.

    explicit    per-sample gradients, then their products (paper, Pseudocode 1 and 2)
    factorised  the paper's: Khatri-Rao for SGD; with a rank-5 gain for AdamW, as it is printed
    looped      the same for AdamW in `primum.paper.low_rank`, one rank after the other
    primum      what `primum.kernel.gram.choose_form` builds for a step of 20 iterations

"Our step" is that plus 22 products with it. "The paper's step", computed from the columns, is one
factorised matrix for SGD and two for AdamW (looped), plus 150 dense products.

Two corrections to the printed code: all ones instead of the identity for the bias (SGD), and
`tau_w` flattened (AdamW), which otherwise does not broadcast.

Arms take turns; times are medians of wall or process time (see the line below the table). An arm
that takes longer than its share is timed once. Memory is the peak of torch's CPU allocator during
the first call over what it held before: it includes results, but not inputs. The paper's figures,
on a Tesla T4, include the inputs and 8 MiB of cuBLAS workspace. What would need more than --cap of
memory is not run.

The second table has relative Frobenius errors of the rank-5 matrices on gains of a real AdamW run:
a head of that size learns to read numbers written in handwritten digits, with as many digits as
its classes need (`--gains random` draws gains at random instead, which is not realistic).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lab.bench._capture import digits, optimizer_of, record
from lab.bench._common import (
    Report,
    clock_for,
    make_parser,
    parse_quick,
    positive,
    take_turns,
    use_threads,
)
from lab.bench.overhead import peak_memory
from primum.kernel.gram import Dense, MatrixFree, choose_form
from primum.paper.low_rank import gram_matrices, weighted_gram

RANK = 5
PRODUCTS = 22  # of a step of ours with 20 iterations
PAPER_PRODUCTS = 150  # of a step of the paper's recipe with 50 iterations, without its guards
CAP_GIB = 6.0
MOMENTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # steps at which gains are captured

HEADER = [
    "optimizer", "head", "B", "explicit ms", "MB", "T4: ms, MB", "factorised ms", "MB",
    "T4: ms, MB", "looped ms", "MB", "paper's step ms", "primum", "build ms", "our step ms", "MB",
    "dense product ms", "matrix-free product ms",
]  # fmt: skip
GAIN_HEADER = ["head", "step", "Q_1 %", "Q_2 %"]

Pair = tuple[float, float]  # milliseconds, megabytes


@dataclass(frozen=True)
class Case:
    """One row of the paper's tables; its values are None where it ran out of memory."""

    optimizer: str
    inputs: int
    outputs: int
    batch: int
    paper_explicit: Pair | None = None
    paper_factorised: Pair | None = None

    def __str__(self) -> str:
        return f"{self.optimizer} {self.inputs}x{self.outputs} B={self.batch}"

    @property
    def explicit_bytes(self) -> int:
        """Per-sample gradients, twice where a gain multiplies them, and three results."""
        copies = 1 if self.optimizer == "sgd" else 2
        return 4 * (copies * self.batch * self.inputs * self.outputs + 3 * self.batch**2)


# The paper's values on a Tesla T4 with 16 GB (Tables 3 and 4): ms, MB.
PAPER = [
    Case("sgd", 64, 10, 128, (0.14, 8.75), (0.107, 8.41)),
    Case("sgd", 64, 10, 512, (0.42, 13.6), (0.343, 12.3)),
    Case("sgd", 64, 10, 2048, (2.60, 79.3), (1.07, 72.7)),
    Case("sgd", 64, 100, 128, (0.22, 11.9), (0.10, 8.46)),
    Case("sgd", 64, 100, 512, (1.63, 26.2), (0.35, 12.5)),
    Case("sgd", 64, 100, 2048, (15.2, 128), (1.03, 73.4)),
    Case("sgd", 2048, 100, 256, (9.08, 231), (0.185, 11.2)),
    Case("sgd", 2048, 100, 1024, (155, 913), (1.95, 32.5)),
    Case("sgd", 2048, 100, 4096, (3381, 3818), (22.3, 298)),
    Case("sgd", 2048, 1000, 256, (127, 2212), (0.326, 12.1)),
    Case("sgd", 2048, 1000, 1024, None, (2.44, 36.1)),
    Case("sgd", 2048, 1000, 4096, None, (29.9, 312)),
    Case("adamw", 384, 10, 128, (0.37, 17.7), (1.77, 16.9)),
    Case("adamw", 384, 10, 512, (1.20, 32.2), (2.17, 34.4)),
    Case("adamw", 384, 10, 2048, (12.5, 112), (8.40, 337)),
    Case("adamw", 384, 100, 128, (1.34, 51.6), (4.77, 17.5)),
    Case("adamw", 384, 100, 512, (7.22, 169), (6.01, 34.9)),
    Case("adamw", 384, 100, 2048, (113, 647), (14.0, 332)),
    Case("adamw", 768, 200, 256, (9.03, 316), (9.71, 21.5)),
    Case("adamw", 768, 200, 1024, (137, 1222), (14.8, 93.2)),
    Case("adamw", 768, 200, 4096, (2882, 4966), (73.8, 1305)),
    Case("adamw", 768, 1000, 256, (62.3, 1519), (89.2, 34.3)),
    Case("adamw", 768, 1000, 1024, (830, 6027), (98.4, 103)),
    Case("adamw", 768, 1000, 4096, None, (212, 1324)),
]


@dataclass(frozen=True)
class Inputs:
    """Shapes: x [B, d_in], g [B, d_out]; for AdamW gain [d_out, d_in], bias_gain [d_out]."""

    x: Tensor
    g: Tensor
    gain: Tensor
    bias_gain: Tensor


def explicit_sgd(given: Inputs) -> Tensor:
    flat = (given.g.unsqueeze(2) * given.x.unsqueeze(1)).flatten(1)
    of_bias = given.g @ given.g.t()
    return flat @ flat.t() + of_bias


def factorised_sgd(given: Inputs) -> Tensor:
    of_bias = given.g @ given.g.t()
    return (given.x @ given.x.t() + 1) * of_bias  # DEPARTS: printed as + I


def explicit_adamw(given: Inputs) -> Tensor:
    flat = (given.g.unsqueeze(2) * given.x.unsqueeze(1)).flatten(1)
    of_weight = (flat * given.gain.flatten()) @ flat.t()
    return of_weight + (given.g * given.bias_gain) @ given.g.t()


def factorised_adamw(given: Inputs) -> Tensor:
    """As printed: all ranks at once."""
    u, s, vh = torch.linalg.svd(given.gain, full_matrices=False)
    left, right = u[:, :RANK].t().unsqueeze(1), vh[:RANK].unsqueeze(1)
    of_inputs = (given.x * right) @ given.x.t()
    of_outputs = (given.g * left) @ given.g.t()
    of_weight = (s[:RANK].view(-1, 1, 1) * of_inputs * of_outputs).sum(0)
    return of_weight + (given.g * given.bias_gain) @ given.g.t()


def looped_adamw(given: Inputs) -> Tensor:
    of_weight = weighted_gram(given.x, given.g, given.gain, RANK)
    return of_weight + (given.g * given.bias_gain) @ given.g.t()


def head_of(case: Case, given: Inputs) -> MatrixFree:
    """The head as a reducer sees it, with a column of ones for the bias."""
    features = nn.functional.pad(given.x, (0, 1), value=1.0)
    if case.optimizer == "sgd":
        return MatrixFree(features, given.g, 1.0, has_bias=True)
    gain = torch.cat([given.gain, given.bias_gain.unsqueeze(1)], 1)
    return MatrixFree(features, given.g, gain, has_bias=True)


def built_and_used(head: MatrixFree) -> Tensor:
    """Everything that our default route computes with the Gram matrix in one step."""
    operator = choose_form(head, PRODUCTS)
    vector = torch.ones(len(head.features))
    for _ in range(PRODUCTS):
        product = operator.times(vector)
    return product


def draw(case: Case) -> Inputs:
    rng = torch.Generator().manual_seed(0)
    shapes = {
        "x": (case.batch, case.inputs),
        "g": (case.batch, case.outputs),
        "gain": (case.outputs, case.inputs),
        "bias_gain": (case.outputs,),
    }
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return Inputs(drawn["x"], drawn["g"], drawn["gain"].abs(), drawn["bias_gain"].abs())


def arms_of(case: Case, cap: float) -> dict[str, Callable[[], object]]:
    """What is timed, by name; without the explicit form if it would exceed the cap."""
    given = draw(case)
    head, vector = head_of(case, given), torch.ones(case.batch)
    arms: dict[str, Callable[[], object]] = {}
    if case.explicit_bytes <= cap * 2**30:
        explicit = explicit_sgd if case.optimizer == "sgd" else explicit_adamw
        arms["explicit"] = partial(explicit, given)
    factorised = factorised_sgd if case.optimizer == "sgd" else factorised_adamw
    arms["factorised"] = partial(factorised, given)
    if case.optimizer == "adamw":
        arms["looped"] = partial(looped_adamw, given)
    arms["primum"] = partial(built_and_used, head)
    arms["build"] = partial(choose_form, head, PRODUCTS)
    arms["dense product"] = partial(Dense(torch.ones(case.batch, case.batch)).times, vector)
    arms["matrix-free product"] = partial(head.times, vector)
    return arms


def measure(case: Case, cap: float, seconds: float, repeats: int) -> dict[str, Any]:
    """Milliseconds and peak bytes of each arm; the explicit form is missing if it did not fit."""
    arms = arms_of(case, cap)
    clock = clock_for(torch.get_num_threads())
    peaks, times = {}, {}
    for name, arm in arms.items():
        start = clock()
        peaks[name] = peak_memory(arm)
        times[name] = [clock() - start]
    often = [name for name in arms if times[name][0] <= seconds / len(arms)]
    turns = take_turns([arms[name] for name in often], seconds, repeats, least=3, clock=clock)
    times |= dict(zip(often, turns, strict=True))
    route = choose_form(head_of(case, draw(case)), PRODUCTS)
    return asdict(case) | {
        "route": "dense" if isinstance(route, Dense) else "matrix-free",
        "ms": {name: 1e3 * median(taken) for name, taken in times.items()},
        "peak_bytes": peaks,
        "calls": {name: len(taken) for name, taken in times.items()},
    }


def paper_step_ms(row: dict[str, Any]) -> float:
    """Cost of the paper's recipe in one step: one matrix or two, and its products with them."""
    made = row["ms"]
    matrices = made["factorised"] if row["optimizer"] == "sgd" else 2 * made["looped"]
    return float(matrices + PAPER_PRODUCTS * made["dense product"])


def cells(row: dict[str, Any]) -> list[str]:
    """One row: our values, with the paper's in between."""
    made, peaks = row["ms"], row["peak_bytes"]

    def both(name: str) -> list[str]:
        if name not in made:
            return ["out of memory" if name == "explicit" else "", ""]
        return [_short(made[name]), _short(peaks[name] / 1e6)]

    def theirs(pair: Pair | None) -> str:
        return "out of memory" if pair is None else f"{pair[0]:g}, {pair[1]:g}"

    return [
        row["optimizer"],
        f"{row['inputs']}x{row['outputs']}",
        str(row["batch"]),
        *both("explicit"),
        theirs(row["paper_explicit"]) if row["in_paper"] else "",
        *both("factorised"),
        theirs(row["paper_factorised"]) if row["in_paper"] else "",
        *both("looped"),
        _short(paper_step_ms(row)),
        row["route"],
        _short(made["build"]),
        *both("primum"),
        _short(made["dense product"]),
        _short(made["matrix-free product"]),
    ]


def _short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def written_numbers(classes: int, batch: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of numbers below `classes`, each digit a handwritten image: [B, places * 64], [B]."""
    data, rng = digits(), torch.Generator().manual_seed(0)
    order, counts = data.labels.argsort(), data.labels.bincount()
    first = counts.cumsum(0) - counts
    places = 10 ** torch.arange(len(str(classes - 1))).flip(0)
    for _ in range(steps):
        numbers = torch.randint(classes, (batch,), generator=rng)
        written = numbers.unsqueeze(1) // places % 10
        which = (torch.rand(written.shape, generator=rng) * counts[written]).long()
        images = data.images[order[first[written] + which]].flatten(1)
        yield images + 0.5 * torch.randn(images.shape, generator=rng), numbers


def captured_heads(
    inputs: int, outputs: int, batch: int, steps: int
) -> Iterator[tuple[int, MatrixFree]]:
    """Heads of a perceptron in plain training by AdamW, with their gains."""
    width = 64 * len(str(outputs - 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = [nn.Linear(width, 256), nn.GELU(), nn.Linear(256, inputs), nn.LayerNorm(inputs)]
        model = nn.Sequential(*body, nn.Linear(inputs, outputs))
    batches = written_numbers(outputs, batch, steps)
    moments = [step for step in MOMENTS if step <= steps]
    *_, last = record(model, optimizer_of("adamw", model), batches, steps, moments, plain=True)
    for moment in last:
        yield moment.number, moment.gram


def random_heads(inputs: int, outputs: int, batch: int) -> Iterator[tuple[int, MatrixFree]]:
    case = Case("adamw", inputs, outputs, batch)
    yield 0, head_of(case, draw(case))


def errors(head: MatrixFree) -> dict[str, float]:
    """Relative Frobenius errors of the rank-5 matrices under the gain and under its square."""
    gain = torch.as_tensor(head.gain).double()
    x, g = head.features.double(), head.output_gradients.double()
    wide = MatrixFree(x, g, gain, has_bias=head.has_bias)
    exact = wide.dense().matrix, MatrixFree(x, g, gain**2).dense().matrix
    pairs = zip(gram_matrices(wide, RANK), exact, strict=True)
    return {
        f"q{power}": float((found - right).norm() / right.norm())
        for power, (found, right) in enumerate(pairs, 1)
    }


def gain_rows(sizes: Sequence[tuple[int, int]], options: argparse.Namespace) -> list[Any]:
    """Errors by size of head and step."""
    rows = []
    for inputs, outputs in tqdm(sizes, desc="gains", unit="head", file=sys.stderr):
        if options.gains == "random":
            heads = random_heads(inputs, outputs, options.gain_batch)
        else:
            heads = captured_heads(inputs, outputs, options.gain_batch, options.gain_steps)
        for step, head in heads:
            rows.append({"inputs": inputs, "outputs": outputs, "step": step} | errors(head))
    return rows


def gain_cells(row: dict[str, Any]) -> list[str]:
    size = f"{row['inputs']}x{row['outputs']}"
    return [size, str(row["step"]), *(f"{100 * row[key]:.2f}" for key in ("q1", "q2"))]


def notes(rows: Sequence[dict[str, Any]], gains: Sequence[dict[str, Any]]) -> list[str]:
    """Summary: ratios of times and of memory, and errors of the rank-5 gain."""
    lines = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        some = [row for row in rows if row["optimizer"] == optimizer]
        fit = [row for row in some if "explicit" in row["ms"]]
        if fit:
            speed = [row["ms"]["explicit"] / row["ms"]["factorised"] for row in fit]
            memory = [
                row["peak_bytes"]["explicit"] / max(1, row["peak_bytes"]["factorised"])
                for row in fit
            ]
            lines.append(
                f"{optimizer}: explicit over factorised, time {min(speed):.2g} to "
                f"{max(speed):.3g}, memory {min(memory):.2g} to {max(memory):.3g} ({len(fit)})."
            )
        step = [row["ms"]["primum"] / paper_step_ms(row) for row in some]
        lines.append(
            f"{optimizer}: our step over the paper's, time {min(step):.2g} to {max(step):.2g}, "
            f"median {median(step):.2g} ({len(some)} sizes)."
        )
    if gains:
        under = sum(row["q1"] < 0.02 for row in gains)
        worst = max(row["q1"] for row in gains)
        lines.append(
            f"Rank {RANK}: error of Q_1 under 2% in {under} of {len(gains)} cases, worst "
            f"{100 * worst:.1f}%; of Q_2 worst {100 * max(row['q2'] for row in gains):.1f}%."
        )
    return lines


def parse_size(text: str) -> tuple[int, int, int]:
    """`2048x100x256`: inputs, outputs, batch."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"a size is INxOUTxBATCH, like 64x10x128, got {text!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("gram.py", __doc__, quick="sizes whose explicit form takes under 100 MB")
    add = made.add_argument
    add("--optimizer", choices=("sgd", "adamw", "both"), default="both")
    add("--sizes", nargs="+", type=parse_size, metavar="INxOUTxB", help="default: the paper's")
    add("--cap", type=float, default=CAP_GIB, metavar="GIB", help="memory limit for one matrix")
    add("--seconds", type=float, help="time budget per size, roughly (default: 4)")
    add("--repeats", type=positive, default=200, help="maximum calls of an arm")
    add("--gains", choices=("digits", "random"), default="digits")
    add("--gain-batch", type=positive, default=256)
    add("--gain-steps", type=positive, help="training steps for the gains (default: 1000)")
    add("--threads", type=positive, default=1, help="torch threads (default: 1)")
    full, quick = {"seconds": 4.0, "gain_steps": 1000}, {"seconds": 0.5, "gain_steps": 20}
    return parse_quick(made, argv, full, quick)


def cases_of(options: argparse.Namespace) -> list[Case]:
    kinds = ("sgd", "adamw") if options.optimizer == "both" else (options.optimizer,)
    if options.sizes:
        known = {(c.optimizer, c.inputs, c.outputs, c.batch): c for c in PAPER}
        wanted = [(kind, *size) for kind in kinds for size in options.sizes]
        return [known.get(key, Case(*key)) for key in wanted]
    cases = [case for case in PAPER if case.optimizer in kinds]
    return [c for c in cases if not options.quick or c.explicit_bytes < 1e8]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    cases = cases_of(options)
    rows = []
    with use_threads(options.threads):
        report = Report("gram.py", argv, options.out)
        measure(Case("adamw", 8, 4, 8), options.cap, 0.1, 3)  # the first use of anything is slow
        bar = tqdm(cases, desc="sizes", unit="size", file=sys.stderr, dynamic_ncols=True)
        for case in bar:
            bar.set_postfix_str(str(case))
            row = measure(case, options.cap, options.seconds, options.repeats)
            rows.append(row | {"in_paper": case in PAPER})
        heads = dict.fromkeys((c.inputs, c.outputs) for c in cases if c.optimizer == "adamw")
        gains = gain_rows(list(heads), options)
    lines = notes(rows, gains)
    content = {"cap_gib": options.cap, "notes": lines}
    tables = [(HEADER, [cells(row) for row in rows])]
    tables += [(GAIN_HEADER, [gain_cells(row) for row in gains])] if gains else []
    content |= {"sizes": rows, "gains": options.gains, "errors": gains}
    report.save(content, *tables, lines)
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
