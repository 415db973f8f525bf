"""Gradient accumulation and clipping, which primum cannot know in advance, against an oracle.

Trains a small CNN on scikit-learn's digits. At some steps it takes the same step in several ways,
on copies, and measures the first-order harm that the head's real step does to the samples of the
batch. The metric is the harm removed, relative to the plain step.

- Accumulation: the batch at once, or as k micro-batches, each reweighted separately. Both with the
  default radius and with radius / sqrt(k), as each micro-batch may change the step by the radius.
- Clipping: its effect on the gradient is only known after the backward pass. The step is predicted
  with no factor, with the library's, with the last step's, with moving averages of it and, as an
  oracle, with the factor of the step itself.

    python benchmarks/loops.py            # two minutes on one core
    python benchmarks/loops.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from _capture import Data, digits, group_norm_cnn, optimizer_of
from _common import Report, make_parser, parse_quick, use_threads
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

import primum

RADIUS = 0.2
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
FULL: dict[str, Any] = {
    "steps": 150,
    "every": 15,
    "seeds": 3,
    "micro_batches": [2, 4, 8],
    "batches": (256, 128),  # for accumulation, for clipping
}
QUICK: dict[str, Any] = {
    "steps": 6,
    "every": 3,
    "seeds": 1,
    "micro_batches": [2],
    "batches": (64, 32),
}
CLIPPING: dict[str, Callable[[Any], object]] = {
    "norm 1": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "norm 0.25": lambda params: nn.utils.clip_grad_norm_(params, 0.25),
    "value 0.02": lambda params: nn.utils.clip_grad_value_(params, 0.02),
    "value 0.005": lambda params: nn.utils.clip_grad_value_(params, 0.005),
}
GUESSES = ("ignored", "primum", "last", "average 0.5", "average 0.9")
ACCUMULATED = [
    "optimizer", "the batch as", "cosine of gradients", "difference %", "cosine of weights",
    "mean weight", "step bent by", "harm removed %",
]  # fmt: skip
CLIPPED = [
    "optimizer",
    "clipping",
    "factor",
    "error %: last",
    "average 0.5",
    "average 0.9",
    *(f"harm removed %: {guess}" if guess == "ignored" else guess for guess in GUESSES),
]


@cache
def data() -> Data:
    return digits()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


def gradients(module: nn.Module) -> Tensor:
    """The gradients of all parameters as one new vector."""
    return flat([p.grad for p in module.parameters() if p.grad is not None])


def cosine(one: Tensor, other: Tensor) -> float:
    return F.cosine_similarity(one.double(), other.double(), 0).item()


@dataclass(frozen=True)
class Taken:
    """A real step of the head per unit lr, flat, with the optimizer's gain and the harm done."""

    step: Tensor
    gain: Tensor
    harm: float

    def bent(self, plain: Taken) -> float:
        """Distance from the plain step relative to its size, in the optimizer's metric."""
        apart, size = self.step - plain.step, plain.step
        return ((apart**2 / plain.gain).sum() / (size**2 / plain.gain).sum()).sqrt().item()


@dataclass(frozen=True)
class Moment:
    """State before a step, and its batch. Never modified: every step is taken on copies."""

    model: nn.Sequential
    optimizer: Optimizer
    images: Tensor
    labels: Tensor

    def copies(self) -> tuple[nn.Sequential, Optimizer]:
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        optimizer.zero_grad()
        return model, optimizer

    def per_sample_gradients(self) -> Tensor:
        """Gradients of each sample's share of the mean loss. [B, parameters of the head]."""
        model, _ = self.copies()
        features = model[:-1](self.images)
        logits = model[-1](features)
        (g,) = torch.autograd.grad(F.cross_entropy(logits, self.labels), logits)
        weight = torch.einsum("bo,bd->bod", g.double(), features.detach().double())
        return torch.cat([weight.flatten(1), g.double()], 1)

    def backward(
        self, micro_batches: int = 1, radius: float | None = RADIUS, factor: float | None = None
    ) -> tuple[nn.Sequential, Optimizer, Tensor]:
        """Copies with gradients, and the extra weights; radius None for plain gradients."""
        model, optimizer = self.copies()
        reducer = None if radius is None else primum.attach(model, optimizer, radius=radius)
        if reducer is not None and factor is not None:
            reducer.load_state_dict(reducer.state_dict() | {"factor": torch.tensor(factor)})
        weights = []
        parts = zip(self.images.chunk(micro_batches), self.labels.chunk(micro_batches), strict=True)
        for images, labels in parts:
            (F.cross_entropy(model(images), labels) / micro_batches).backward()
            if reducer is not None and reducer.last is not None:
                assert reducer.last.applied, reducer.last.reason
                weights.append(reducer.last.extra_weights)
        if reducer is not None:
            reducer.remove()
        return model, optimizer, torch.cat(weights) if weights else torch.zeros(len(self.labels))


def take(model: nn.Sequential, optimizer: Optimizer, per_sample: Tensor) -> Taken:
    """Step, and measure the head. Modifies its arguments."""
    head = list(model[-1].parameters())
    before = flat(head).double()
    optimizer.step()
    group = optimizer.param_groups[0]
    step = (flat(head).double() - before) / group["lr"]
    gain = torch.ones_like(step)
    if isinstance(optimizer, AdamW):
        beta1, beta2 = group["betas"]
        count = float(optimizer.state[head[0]]["step"])
        square = flat([optimizer.state[p]["exp_avg_sq"] for p in head]).double()
        root = (square / (1 - beta2**count)).sqrt() + group["eps"]
        gain = (1 - beta1) / (1 - beta1**count) / root
    return Taken(step, gain, (per_sample @ step).clamp_min(0).sum().item())


def moments(
    kind: str, batch: int, options: argparse.Namespace, seed: int, clip: Callable[[Any], object]
) -> Iterator[tuple[Moment | None, primum.Reducer, float]]:
    """Train with primum. Yields a moment before some steps, and the clipping factor of every step.

    The factor is the least-squares fit on the head; for clipping by norm, the exact factor.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = group_norm_cnn(1, 8, 10)
    assert isinstance(model, nn.Sequential)
    optimizer = optimizer_of(kind, model, batch)
    reducer = primum.attach(model, optimizer)
    batches = data().batches(batch, options.steps, torch.Generator().manual_seed(seed))
    for number, (images, labels) in enumerate(batches, 1):
        optimizer.zero_grad()
        if number % options.every == 0:
            yield Moment(model, optimizer, images, labels), reducer, float("nan")
        F.cross_entropy(model(images), labels).backward()
        left = left_by(clip, model)
        yield None, reducer, left
        optimizer.step()


def left_by(clip: Callable[[Any], object], model: nn.Sequential) -> float:
    """Clip; return the best-fitting factor on the head's gradient."""
    before = gradients(model[-1])
    clip(model.parameters())
    after = gradients(model[-1])
    return (after.dot(before) / before.dot(before)).item()


def accumulation(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way to process the batch, compared with the batch at once."""
    ways: dict[str, tuple[int, float | None]] = {"plain gradients": (1, None), "one": (1, RADIUS)}
    for k in options.micro_batches:
        ways[f"{k} parts"] = k, RADIUS
        ways[f"{k} parts, radius / sqrt({k})"] = k, RADIUS / k**0.5
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for seed in range(options.seeds):
        for moment, _, _ in moments(kind, options.batches[0], options, seed, lambda params: None):
            if moment is None:
                continue
            per_sample = moment.per_sample_gradients()
            made = {way: moment.backward(*setting) for way, setting in ways.items()}
            gradient = {way: gradients(model) for way, (model, _, _) in made.items()}
            steps = {way: take(*copies, per_sample) for way, (*copies, _) in made.items()}
            weights = {way: each for way, (*_, each) in made.items()}
            plain, one = steps["plain gradients"], gradient["one"]
            for way, step in steps.items():
                found[way].append(
                    [
                        cosine(gradient[way], one),
                        ((gradient[way] - one).norm() / one.norm()).item(),
                        cosine(weights[way], weights["one"]),
                        weights[way].mean().item(),
                        step.bent(plain),
                        plain.harm - step.harm,
                        plain.harm,
                    ]
                )
    rows = []
    for way, values in found.items():
        mean = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        names = ("cosine", "difference", "weights_cosine", "mean_weight", "bent")
        named = dict(zip(names, mean, strict=False))
        rows.append(
            {"optimizer": OPTIMIZERS[kind], "way": way, "moments": len(values)}
            | named
            | {"removed": mean[5] / mean[6]}
        )
    return rows


def clipping(kind: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row: errors of the guessed factors, and the harm removed with each."""
    clip = CLIPPING[name]
    factors: list[float] = []
    errors: dict[str, list[float]] = {guess: [] for guess in GUESSES[2:]}
    harm: dict[str, float] = dict.fromkeys(("plain", "known", *GUESSES), 0.0)
    count = 0
    for seed in range(options.seeds):
        guesses: dict[str, float] = {}
        for moment, reducer, left in moments(kind, options.batches[1], options, seed, clip):
            if moment is not None:
                measured = reducer.state_dict()["factor"]
                guesses |= {"ignored": 1.0, "primum": 1.0 if measured is None else float(measured)}
                for arm, value in harms(moment, clip, guesses).items():
                    harm[arm] += value
                count += 1
                continue
            factors.append(left)
            for guess, value in guesses.items():
                if guess in errors:
                    errors[guess].append(abs(value / left - 1))
            for guess, keep in (("last", 0.0), ("average 0.5", 0.5), ("average 0.9", 0.9)):
                guesses[guess] = keep * guesses.get(guess, left) + (1 - keep) * left
    best = harm["plain"] - harm["known"]
    return {
        "optimizer": OPTIMIZERS[kind],
        "clipping": name,
        "moments": count,
        "clipped": sum(each < 0.999 for each in factors) / len(factors),
        "factor": median(factors),
        "errors": {guess: sum(each) / len(each) for guess, each in errors.items()},
        "removed_known": best / harm["plain"],
        "removed": {guess: (harm["plain"] - harm[guess]) / best for guess in GUESSES},
    }


def harms(
    moment: Moment, clip: Callable[[Any], object], guesses: dict[str, float]
) -> dict[str, float]:
    """Harm of the plain step, of the steps with guessed factors, and with the known factor."""
    per_sample = moment.per_sample_gradients()

    def attempt(radius: float | None, factor: float) -> tuple[float, float]:
        model, optimizer, _ = moment.backward(1, radius, factor)
        left = left_by(clip, model)
        return take(model, optimizer, per_sample).harm, left

    harm = {guess: attempt(RADIUS, factor)[0] for guess, factor in guesses.items()}
    harm["plain"], known = attempt(None, 1.0)
    for _ in range(3):  # weights and norm depend on each other
        harm["known"], known = attempt(RADIUS, known)
    return harm


def accumulated_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["optimizer"],
        row["way"],
        f"{row['cosine']:.3f}",
        f"{100 * row['difference']:.0f}",
        f"{row['weights_cosine']:.2f}",
        f"{row['mean_weight']:.2f}",
        f"{row['bent']:.2f}",
        f"{100 * row['removed']:.0f}",
    ]


def clipped_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["optimizer"],
        row["clipping"],
        f"{row['factor']:.2f}",
        *(f"{100 * row['errors'][guess]:.0f}" for guess in GUESSES[2:]),
        *(f"{100 * row['removed'][guess]:.0f}" for guess in GUESSES),
    ]


def verdicts(clipped: Sequence[dict[str, Any]]) -> list[str]:
    """Gain of averaging the factor, one line for each average."""
    lines = []
    for guess in GUESSES[3:]:
        gains = [100 * (row["removed"][guess] - row["removed"]["last"]) for row in clipped]
        lines.append(
            f"Harm removed with {guess} instead of the last factor: {min(gains):+.1f} to "
            f"{max(gains):+.1f} points."
        )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("loops.py", __doc__, quick="one seed, few steps: seconds")
    return parse_quick(made, argv, FULL, QUICK)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    accumulated: list[dict[str, Any]] = []
    clipped: list[dict[str, Any]] = []
    with use_threads(1):
        report = Report("loops.py", argv, options.out)
        bar = tqdm(total=2 + 2 * len(CLIPPING), desc="cases", unit="case", dynamic_ncols=True)
        for kind in OPTIMIZERS:
            accumulated += accumulation(kind, options)
            bar.update()
            for name in CLIPPING:
                clipped.append(clipping(kind, name, options))
                bar.update()
        bar.close()
    setting = (
        f"Group-norm CNN on digits; seeds: {options.seeds}; {options.steps} steps each, every "
        f"{options.every}th looked at; batch {options.batches[0]} for accumulation, "
        f"{options.batches[1]} for clipping."
    )
    said = verdicts(clipped)
    report.save(
        {"setting": setting, "verdicts": said, "accumulation": accumulated, "clipping": clipped},
        (ACCUMULATED, [accumulated_cells(row) for row in accumulated]),
        (CLIPPED, [clipped_cells(row) for row in clipped]),
        [*said, setting],
    )
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
