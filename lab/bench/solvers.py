"""Quality and cost of solving a step's problem: the paper's solver, ours and Clarabel.

A small group-norm CNN is trained with SGD and a small transformer with AdamW, both with the paper's
recipe, at several batch sizes. The problems of some steps are captured and given to every solver.

Solutions are evaluated in float64, with exact Gram matrices and without guards, on two problems:

- the paper's (Eq. 10, Eq. 14). "Removed" is the share of the harm that extra weights remove,
  "attained" is that relative to an interior-point method (Clarabel).
- ours, which has a quadratic term where the paper has a box and, for AdamW, a trust region in the
  optimizer's own metric. "Ours" is the share of the possible improvement that is reached.

Extra weights outside the trust region of the problem they are evaluated on are scaled into it
first; "size" and "our size" are their sizes before that, relative to the radius. Each solver is
thus evaluated on its own problem and on the other one; "primum, solved exactly" separates the
effect of our problem from that of our solver.

Time covers everything from the captured gradients to extra weights. Products are those with a Gram
matrix or a matrix like it; the paper's iteration takes three.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from lab.bench._capture import LABELS, Data, Moment, capture, cifar, digits, evenly
from lab.bench._common import (
    Report,
    clock_for,
    make_parser,
    parse_quick,
    positive,
    take_turns,
    use_threads,
)
from lab.bench._figures import NAMES, over_training
from primum.kernel.gram import Dense, MatrixFree, choose_form
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Problem, StepProblem
from primum.kernel.recipe import Primum
from primum.kernel.solver import solve
from primum.paper import Paper, PaperSettings
from primum.paper.chambolle_pock import PaperProblem, chambolle_pock
from primum.paper.exact import exact_weights
from primum.paper.spectrum import EXACT_UP_TO, lanczos_iterations

BATCHES = (32, 128, 256, 512, 1024)
OPTIMIZERS = ("sgd", "adamw")
RADIUS = 0.2
OWN_EXACT_UP_TO = 128  # batches where Clarabel also solves our problem
LONG = 3000  # iterations of ours that stand for its exact solution, in float64
GAP = 0.01  # certified gap; how many iterations does it take?
MOST = 50
HEADER = [
    "optimizer", "B", "solver", "removed %", "attained %", "worst %", "ours %", "worst %", "size",
    "our size", "iterations", "products", "ms", "problems",
]  # fmt: skip
OWN_HEADER = [
    "optimizer", "B", "iterations", "certified gap %", "worst %", "true gap %", "worst %",
    "problems",
]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Extra weights, and the iterations and products they took."""

    weights: Tensor
    iterations: int | None
    products: int | None


Arm = Callable[[Moment], Answer]


def paper_recipe(moment: Moment, iterations: int, tol: float) -> Answer:
    """As in training: guards with their averages, rank-5 gain, Lanczos from B = 257 on."""
    recipe = Paper(PaperSettings(radius=RADIUS, solver_iters=iterations, tol=tol))
    recipe.load_state_dict(copy.deepcopy(moment.guards))
    update = moment.update
    norm = update.norm(recipe.metric)
    found = recipe(StepProblem(moment.gram, moment.drift, norm, update.lr))
    made, batch = int(found.iterations), len(moment.drift)
    matrices = 1 if moment.gram.uniform_gain else 2
    spectrum = matrices * lanczos_iterations(batch) if batch > EXACT_UP_TO else 0
    return Answer(found.extra_weights, made, 3 * made + spectrum)


def paper_bare(moment: Moment, iterations: int, tol: float) -> Answer:
    """The paper's solver alone: no guards, exact gain, exact spectral norm."""
    problem = paper_problem(moment)
    norm = torch.linalg.eigvalsh(problem.gram)[-1]
    weights, made = chambolle_pock(problem, norm, iterations=iterations, tol=tol)
    return Answer(weights, int(made), 3 * int(made))


def ours(moment: Moment, iterations: int) -> Answer:
    recipe, update = Primum(radius=RADIUS, max_iters=iterations, tolerance=0.0), moment.update
    gram = choose_form(moment.gram, recipe.products)
    norm = update.norm(recipe.metric)
    found = recipe(StepProblem(gram, moment.drift, norm, update.lr))
    return Answer(found.extra_weights, iterations, None)


def clarabel(moment: Moment) -> Answer:
    return Answer(exact_weights(paper_problem(moment))[0], None, None)


# PAPER: 50 iterations and the tolerance of the recipe. 2000 iterations show what the iteration can
# do, so they do not stop early.
FAST: dict[str, Arm] = {
    "paper 50": partial(paper_recipe, iterations=50, tol=PaperSettings.tol),
    "paper 50, bare": partial(paper_bare, iterations=50, tol=PaperSettings.tol),
    "primum 20": partial(ours, iterations=20),
    "primum 50": partial(ours, iterations=50),
}
SLOW: dict[str, Arm] = {
    "paper 2000": partial(paper_recipe, iterations=2000, tol=0.0),
    "paper 2000, bare": partial(paper_bare, iterations=2000, tol=0.0),
}
ORDER = (
    "paper 50", "paper 2000", "paper 50, bare", "paper 2000, bare", "primum 20", "primum 50",
    "primum, solved exactly", "Clarabel",
)  # fmt: skip


def paper_problem(moment: Moment) -> PaperProblem:
    """Eq. 10 or Eq. 14 with exact matrices, per unit lr."""
    head = moment.gram
    gram = head.dense().matrix
    squared = MatrixFree(head.features, head.output_gradients, head.gain**2)
    metric = gram if head.uniform_gain and head.gain == 1 else squared.dense().matrix
    reach_squared = RADIUS**2 * moment.update.step.square().sum()
    return PaperProblem(gram, metric, moment.drift, reach_squared)


def own_problem(moment: Moment) -> Problem:
    """Our problem with a dense Gram matrix, for any size."""
    head = moment.gram
    reach = RADIUS * moment.update.norm("gain")
    return Problem.dense(head.dense().matrix, moment.drift, reach)


def own_optimum(problem: Problem) -> float:
    """The smallest value of our problem, by Clarabel."""
    import cvxpy as cp
    import numpy as np

    assert isinstance(problem.gram, Dense)
    gram, drift = problem.gram.matrix.numpy(), problem.drift.numpy()
    unit, reach = drift.clip(0).sum(), float(problem.trust_radius)
    values, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(values.clip(0))).T / reach
    weights, moved = cp.Variable(len(drift)), cp.Variable(len(drift))
    quadratic = cp.sum_squares(moved) * (reach**2 / (2 * problem.max_extra_weight * unit))
    harm = cp.sum(cp.pos(drift / unit - (gram / unit) @ weights))
    constraints = [moved == root @ weights, cp.norm(moved) <= 1, weights >= 0]
    return float(cp.Problem(cp.Minimize(harm + quadratic), constraints).solve(solver="CLARABEL"))


def in_double(moment: Moment) -> Moment:
    head, update = moment.gram, moment.update
    gain = head.gain.double() if isinstance(head.gain, Tensor) else head.gain
    x, g = head.features.double(), head.output_gradients.double()
    wide = MatrixFree(x, g, gain, has_bias=head.has_bias)
    step = update.step.double()
    moved = Update(step, gain, update.lr)
    return Moment(moment.number, wide, moved, wide.along(step), moment.guards)


class Judge:
    """Evaluates extra weights on the exact problems, in float64."""

    def __init__(self, moment: Moment) -> None:
        self.moment = in_double(moment)
        self.problem = paper_problem(self.moment)
        self.own = own_problem(self.moment)
        self.harm = float(self.problem.harm(torch.zeros_like(self.problem.drift)))

    def figures(self, answer: Answer) -> dict[str, Any]:
        """`removed` as a share of the harm; sizes relative to the two trust regions."""
        problem, weights = self.problem, answer.weights.double()
        size = float((weights @ (problem.metric @ weights) / problem.reach_squared).sqrt())
        own_size = float((weights @ (problem.gram @ weights)).sqrt() / self.own.trust_radius)
        inside, own_inside = weights / max(1.0, size), weights / max(1.0, own_size)
        return {
            "removed": 1 - float(problem.harm(weights)) / self.harm,
            "removed_inside": 1 - float(problem.harm(inside)) / self.harm,
            "own_improvement": 1 - self.own_objective(own_inside) / self.harm,
            "size": size,
            "own_size": own_size,
            "largest": float(weights.max()),
            "iterations": answer.iterations,
            "products": answer.products,
        }

    def own_objective(self, weights: Tensor) -> float:
        """Harm and quadratic term of our problem."""
        product = self.problem.gram @ weights
        harm = (self.own.drift - product).clamp_min(0).sum()
        return float(harm + weights @ product / (2 * self.own.max_extra_weight))

    def gaps(self, moment: Moment) -> dict[str, Any]:
        """Our solver on our problem, all relative to the harm."""
        limit = solve(self.own, LONG)
        best, bound = float(limit.objective) / self.harm, float(limit.lower_bound) / self.harm
        found: dict[str, Any] = {"optimum": best, "optimum_gap": best - bound, "clarabel": None}
        if len(moment.drift) <= OWN_EXACT_UP_TO:
            found["clarabel"] = own_optimum(self.own)
        short = own_problem(moment)
        for iterations in (20, 50):
            answer = solve(short, iterations)
            value = float(answer.objective) / self.harm
            certified = value - float(answer.lower_bound) / self.harm
            found[str(iterations)] = {"certified": certified, "true": value - bound}
        found["figures"] = self.figures(Answer(limit.extra_weights, None, None))
        return found


def iterations_to_gap(moment: Moment) -> int | None:
    """Fewest iterations of ours, up to MOST, that prove the answer within GAP of the harm."""
    problem, harm = own_problem(moment), moment.drift.clamp_min(0).sum()
    low, high = 0, MOST + 1  # the gap never grows: the best point and the best bound are kept
    while high - low > 1:
        middle = (low + high) // 2
        found = solve(problem, middle)
        proven = bool(found.objective - found.lower_bound <= GAP * harm)
        low, high = (low, middle) if proven else (middle, high)
    return high if high <= MOST else None


class Products(TorchDispatchMode):
    """Counts products of a square matrix with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mv.default:
            self.count += args[0].shape[0] == args[0].shape[1]
        return func(*args, **(kwargs or {}))


def examine(moment: Moment, exact: bool, slow: bool, seconds: float) -> dict[str, Any] | None:
    """All solvers on one problem; None if no sample is harmed, so there is nothing to solve."""
    judge = Judge(moment)
    if not judge.harm > 0:
        return None
    clock = clock_for(torch.get_num_threads())
    turns = [partial(arm, moment) for arm in FAST.values()]
    times = take_turns(turns, seconds, most=9, least=2, clock=clock)
    arms: dict[str, dict[str, Any]] = {}
    for (name, arm), taken in zip(FAST.items(), times, strict=True):
        arms[name] = judge.figures(arm(moment)) | {"ms": 1e3 * median(taken)}
    for iterations in (20, 50):
        with Products() as counter:
            solve(own_problem(moment), iterations)
        arms[f"primum {iterations}"]["products"] = counter.count
    once = dict(SLOW) if slow else {}
    if exact:
        once["Clarabel"] = lambda _: clarabel(judge.moment)
    for name, arm in once.items():
        start = clock()
        answer = arm(moment)
        arms[name] = {"ms": 1e3 * (clock() - start)} | judge.figures(answer)
    own = judge.gaps(moment)
    arms["primum, solved exactly"] = own.pop("figures") | {"ms": None}
    return {
        "step": moment.number,
        "harm": judge.harm,
        "slow": slow,
        "optimum": arms["Clarabel"]["removed_inside"] if exact else None,
        "iterations_to_gap": iterations_to_gap(moment),
        "arms": arms,
        "own": own,
    }


def subset(count: int, batch: int) -> set[int]:
    """Indices of the problems for the slow solvers: all, but 4 at B = 512 and 2 above."""
    most = count if batch <= 256 else 4 if batch <= 512 else 2
    if most >= count:
        return set(range(count))
    return {int(count * (n + 0.5) / most) for n in range(most)}


def summarise(optimizer: str, batch: int, problems: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Table rows: means over the problems that every solver was given."""
    common = [p for p in problems if p["slow"]]
    rows = []
    for name in ORDER:
        seen = [p["arms"][name] for p in common if name in p["arms"]]
        if not seen:
            continue
        shares = [
            p["arms"][name]["removed_inside"] / p["optimum"]
            for p in common
            if p["optimum"] and name in p["arms"]
        ]
        own = [
            p["arms"][name]["own_improvement"] / (1 - p["own"]["optimum"])
            for p in common
            if name in p["arms"]
        ]
        rows.append(
            [
                optimizer,
                str(batch),
                name,
                f"{100 * fmean([a['removed_inside'] for a in seen]):.1f}",
                f"{100 * fmean(shares):.1f}" if shares else "",
                f"{100 * min(shares):.1f}" if shares else "",
                f"{100 * fmean(own):.1f}",
                f"{100 * min(own):.1f}",
                f"{fmean([a['size'] for a in seen]):.2f}",
                f"{fmean([a['own_size'] for a in seen]):.2f}",
                _whole([a["iterations"] for a in seen]),
                _whole([a["products"] for a in seen]),
                f"{median([a['ms'] for a in seen]):.2f}" if seen[0]["ms"] is not None else "",
                str(len(seen)),
            ]
        )
    return rows


def own_rows(optimizer: str, batch: int, problems: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for iterations in ("20", "50"):
        certified = [100 * p["own"][iterations]["certified"] for p in problems]
        true = [100 * p["own"][iterations]["true"] for p in problems]
        rows.append(
            [
                optimizer,
                str(batch),
                iterations,
                *(f"{value:.3f}" for value in (fmean(certified), max(certified))),
                *(f"{value:.3f}" for value in (fmean(true), max(true))),
                str(len(problems)),
            ]
        )
    return rows


def _whole(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.0f}" if known else ""


def checks(groups: Sequence[dict[str, Any]]) -> list[str]:
    """How exact the references are, and where the paper's solver removes more than ours."""
    problems = [p for group in groups for p in group["problems"]]
    lines = []
    long_gap = max(p["own"]["optimum_gap"] for p in problems)
    apart = [
        abs(p["own"]["optimum"] - p["own"]["clarabel"]) for p in problems if p["own"]["clarabel"]
    ]
    note = f"{LONG} iterations of ours in float64 are within {100 * long_gap:.2g}% of the harm of "
    note += "our problem's optimum by their own certificate"
    if apart:
        note += f", and within {100 * max(apart):.1g}% of Clarabel's on {len(apart)} problems"
    lines.append(note + ".")
    for optimizer in dict.fromkeys(group["optimizer"] for group in groups):
        some = [p for g in groups if g["optimizer"] == optimizer for p in g["problems"]]
        for mine in ("primum 20", "primum 50"):
            behind = [
                p["arms"]["paper 50"]["removed_inside"] - p["arms"][mine]["removed_inside"]
                for p in some
            ]
            ahead = [gain for gain in behind if gain > 0.001]
            lines.append(
                f"{optimizer}: the paper's recipe removes more than {mine} (by over 0.1% of the "
                f"harm) in {len(ahead)} of {len(some)} problems"
                + (f", by {100 * max(ahead):.1f}% of the harm at most." if ahead else ".")
            )
    return lines


def run(options: argparse.Namespace, data: Data) -> list[dict[str, Any]]:
    """All problems by optimizer and batch size."""
    groups = []
    cells = [(kind, batch) for kind in options.optimizers for batch in options.batches]
    moments_at = evenly(options.problems, options.steps)
    work = len(cells) * (options.steps + len(moments_at))
    with tqdm(total=work, unit="step", file=sys.stderr, dynamic_ncols=True) as bar:
        for kind, batch in cells:
            bar.set_description(f"{kind} B={batch}, training")
            moments: list[Moment] = []
            for kept in capture(kind, data, batch, options.steps, moments_at, options.seed):
                moments = kept
                bar.update()
            bar.set_description(f"{kind} B={batch}, solving")
            slow = subset(len(moments), batch)
            problems = []
            for index, moment in enumerate(moments):
                exact = index in slow and batch <= options.exact_up_to
                found = examine(moment, exact, index in slow, options.seconds)
                problems += [] if found is None else [found]
                bar.update()
            groups.append({"optimizer": kind, "batch": batch, "problems": problems})
    return groups


def draw(groups: Sequence[dict[str, Any]], data: Data, out: Path) -> list[Path]:
    """A plot for each optimizer (appendix G), and one of both at a middle batch (Figure 2)."""
    filled = [group for group in groups if group["problems"]]
    kinds = list(dict.fromkeys(group["optimizer"] for group in filled))
    made = []
    for kind in kinds:
        mine = [group for group in filled if group["optimizer"] == kind]
        path = out.with_name(f"{out.stem}-{kind}")
        over_training([(f"B = {g['batch']}", g["problems"]) for g in mine], path)
        made.append(path)
    batches = sorted({group["batch"] for group in filled})
    middle = 128 if 128 in batches else batches[len(batches) // 2]
    both = [g for g in filled if g["batch"] == middle]
    path = out.with_name(f"{out.stem}-figure2")
    titles = [f"{NAMES[g['optimizer']]},\n{data.name}, B = {middle}" for g in both]
    over_training(list(zip(titles, (g["problems"] for g in both), strict=True)), path)
    return [*made, path]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("solvers.py", __doc__, quick="small batches, few problems: a minute")
    add = made.add_argument
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--batches", nargs="+", type=positive, metavar="B", help=f"default: {BATCHES}")
    add("--steps", type=positive, help="training steps (default: 150)")
    add("--problems", type=positive, help="captured in each training run (default: 10)")
    add("--exact-up-to", type=int, metavar="B", default=512, help="largest batch for Clarabel")
    add("--dataset", choices=("digits", *LABELS), default="digits")
    add("--data-dir", type=Path, metavar="DIR", help="folder of CIFAR's train-*.parquet")
    add("--images", type=positive, default=10_000, help="maximum number of CIFAR images")
    add("--seconds", type=float, default=0.5, help="time budget per problem")
    add("--threads", type=positive, default=1, help="torch threads (default: 1)")
    add("--seed", type=int, default=0)
    quick = {"batches": [32, 128], "steps": 40, "problems": 4}
    full = {"batches": list(BATCHES), "steps": 150, "problems": 10}
    options = parse_quick(made, argv, full, quick)
    if options.dataset != "digits" and options.data_dir is None:
        made.error(f"--dataset {options.dataset} needs --data-dir")
    if options.dataset != "digits" and options.out == made.get_default("out"):
        options.out = options.out.with_stem(f"solvers-{options.dataset}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.dataset == "digits":
        data = digits()
    else:
        data = cifar(options.data_dir, options.dataset, options.images)
    with use_threads(options.threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        report = Report("solvers.py", argv, options.out)
        groups = run(options, data)
    rows = [row for g in groups for row in summarise(g["optimizer"], g["batch"], g["problems"])]
    own = [row for g in groups for row in own_rows(g["optimizer"], g["batch"], g["problems"])]
    notes = checks(groups)
    report.save(
        {"data": data.name, "notes": notes, "groups": groups},
        (HEADER, rows),
        "Our problem, gaps relative to the harm:",
        (OWN_HEADER, own),
        notes,
        *(f"![{path.name}]({path.name}.svg)" for path in draw(groups, data, options.out)),
    )
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
