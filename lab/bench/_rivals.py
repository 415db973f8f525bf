"""Added time of a step: primum, the paper's recipe and TorchJD's UPGrad on the same head."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import primum
from lab.bench._common import clock_for, take_turns
from lab.weightings import UpGrad

HEADS = [(64, 10), (64, 100)]
BATCHES = [64, 128, 512]
LARGEST_UPGRAD = 64  # samples: one quadratic program each takes a second at 128
GOAL = 0.12  # mean added time at most this share of the paper's
HEADER = ["optimizer", "head", "batch", "plain ms", "primum +ms", "paper +ms", "UPGrad +ms"]
HEADER += ["primum / paper", "iterations"]


@dataclass(frozen=True)
class Rivals:
    """Medians of one case: milliseconds of a plain step, and what each recipe adds to it."""

    optimizer: str
    inputs: int
    outputs: int
    batch: int
    plain_ms: float
    primum_ms: float
    paper_ms: float
    upgrad_ms: float | None
    iterations: float
    rounds: int

    @property
    def ratio(self) -> float:
        return self.primum_ms / self.paper_ms

    def cells(self) -> list[str]:
        upgrad = "not run" if self.upgrad_ms is None else f"{self.upgrad_ms:.1f}"
        return [
            self.optimizer,
            f"{self.inputs}x{self.outputs}",
            str(self.batch),
            f"{self.plain_ms:.3f}",
            f"{self.primum_ms:.3f}",
            f"{self.paper_ms:.2f}",
            upgrad,
            f"{self.ratio:.3f}",
            f"{self.iterations:.1f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


class Training:
    """A tiny network in real training, so that the problems are realistic."""

    def __init__(self, kind: str, inputs: int, outputs: int, batch: int, recipe: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
        make: Callable[..., torch.optim.Optimizer] = (
            partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=5e-4)
            if kind == "sgd"
            else partial(torch.optim.AdamW, lr=1e-3)
        )
        self.optimizer = make(self.model.parameters())
        self.inputs = torch.randn(4096, 32)
        self.labels = (nn.Linear(32, outputs)(self.inputs) + torch.randn(4096, outputs)).argmax(1)
        self.order = torch.Generator().manual_seed(1)
        self.batch, self.made = batch, 0
        self.iterations = 0.0
        self.reducer = None
        if recipe is not None:
            self.reducer = primum.attach(self.model, self.optimizer, recipe=copy.deepcopy(recipe))

    def rows(self) -> Tensor:
        return torch.randint(len(self.inputs), (self.batch,), generator=self.order)

    def step(self) -> None:
        rows = self.rows()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.inputs[rows]), self.labels[rows])
        loss.backward()
        self.optimizer.step()
        self.made += 1
        if self.reducer is not None and self.reducer.last is not None:
            self.iterations += float(self.reducer.last.solution.iterations)


def measure_rivals(seconds: float, rounds: int) -> list[Rivals]:
    """Measure all cases in about `seconds`; recipes take turns, one step each."""
    cases = list(product(("sgd", "adamw"), HEADS, BATCHES))
    begin, found = perf_counter(), []
    for number, (kind, (inputs, outputs), batch) in enumerate(tqdm(cases, desc="recipes")):
        recipes: list[Any] = [None, "primum", "paper"]
        if batch <= LARGEST_UPGRAD:
            recipes.append(UpGrad(mean_one=False))
        arms = [Training(kind, inputs, outputs, batch, recipe) for recipe in recipes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # primum is slow for tiny networks
            for arm in arms:
                for _ in range(2):  # the second step is the first to find optimizer state
                    arm.step()
            left = (seconds - (perf_counter() - begin)) / (len(cases) - number)
            clock = clock_for(torch.get_num_threads())
            times = take_turns([arm.step for arm in arms], left, rounds, 3, clock=clock)
        plain, *added = (1e3 * median(each) for each in times)
        found.append(
            Rivals(
                kind,
                inputs,
                outputs,
                batch,
                plain,
                added[0] - plain,
                added[1] - plain,
                added[2] - plain if len(added) > 2 else None,
                arms[1].iterations / arms[1].made,
                len(times[0]),
            )
        )
    return found


def verdict(rivals: Sequence[Rivals]) -> str:
    """One line: whether the goal is met."""
    mean = sum(each.ratio for each in rivals) / len(rivals)
    met = "met" if mean <= GOAL else "NOT met"
    low, high = min(r.ratio for r in rivals), max(r.ratio for r in rivals)
    return (
        f"Goal, at most {GOAL} of the paper's added time in the mean: {met}, {mean:.3f} "
        f"({low:.3f} to {high:.3f})."
    )
