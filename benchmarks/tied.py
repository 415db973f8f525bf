"""Tied head and embedding: how large is the part of the gradient that primum does not predict?

When the gradient arrives at the head's output, that of the embedding has not been computed yet, so
the step of the shared weight is predicted from the head's share alone. Trains a small GPT on
Python's own help, by characters and by words, in four ways: plain, with primum ("head alone"), with
the embedding's share of the last step added to the prediction ("last step's") and, as an oracle,
with its share in the step itself ("whole"). At some steps it compares the three predictions.

    python benchmarks/tied.py            # twenty minutes on one core
    python benchmarks/tied.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _clients import Text, characters, words
from _clients_text import Gpt
from _common import Report, make_parser, parse_quick, use_threads
from torch import Tensor, optim
from torch.optim import Optimizer
from tqdm import tqdm

from primum.pipeline import Captured, weigh
from primum.recipe import Primum
from primum.update import predict

KNOWN = ("head alone", "last step's", "whole")
OPTIMIZERS = {
    "SGD": lambda params: optim.SGD(params, lr=0.2, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1),
}
RADIUS = 0.1
FULL: dict[str, Any] = {
    "steps": 300,
    "every": 30,
    "seeds": 3,
    "texts": {"characters": (8, 64), "words": (8, 32)},
    "vocabulary": 1000,
}
QUICK: dict[str, Any] = {
    "steps": 4,
    "every": 2,
    "seeds": 1,
    "texts": {"characters": (4, 8)},
    "vocabulary": 50,
}


@dataclass(frozen=True)
class Batch:
    """A forward pass of N tokens, and its gradients at the head.

    Attributes:
        losses: Of the tokens. [N].
        features: The head's input. [N, d].
        gradients: Of the mean loss, at the head's output. [N, d_out].
    """

    losses: Tensor
    features: Tensor
    gradients: Tensor

    def share_of_head(self, extra: Tensor | float = 0.0) -> Tensor:
        """The head's part of the gradient of the weight. [d_out, d]."""
        weights = torch.as_tensor(1 + extra).expand(len(self.losses)).unsqueeze(1)
        return (weights * self.gradients).t() @ self.features

    def whole(self, weight: Tensor, extra: Tensor | float = 0.0) -> Tensor:
        """The gradient of the shared weight, from head and embedding. [d_out, d]."""
        loss = ((1 + extra) * self.losses).mean()
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    def drift(self, step: Tensor) -> Tensor:
        """First-order change of the tokens' losses by a step of the weight in the head. [N]."""
        return ((self.features @ step.t()) * self.gradients).sum(1)


def forward(model: Gpt, windows: Tensor) -> Batch:
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, output: seen.append(args[0]))
    logits = model(windows[:, :-1]).flatten(0, 1)
    handle.remove()
    losses = F.cross_entropy(logits, windows[:, 1:].flatten(), reduction="none")
    gradients = torch.autograd.grad(losses.mean(), logits, retain_graph=True)[0]
    return Batch(losses, seen[0].detach().flatten(0, 1), gradients)


def weights_of(
    model: Gpt, optimizer: Optimizer, batch: Batch, share: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Drift and extra weights, assuming that the embedding adds `share` to the gradient."""
    captured = Captured(batch.features, batch.gradients, accumulated=share)
    with torch.no_grad():
        drift, solution = weigh(model.lm_head, {"weight": optimizer}, captured, Primum(RADIUS))
    return drift, solution.extra_weights


def cosine(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.flatten(), other.flatten(), 0))


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def moment(model: Gpt, optimizer: Optimizer, batch: Batch, last: Tensor) -> dict[str, Any]:
    """How the three predictions compare at one step."""
    weight = model.lm_head.weight
    head, whole = batch.share_of_head(), batch.whole(weight)
    share = whole - head
    true_step = predict(optimizer, weight, whole).step
    true_drift, true_weights = weights_of(model, optimizer, batch, share)
    plain_harm = batch.drift(true_step).clamp_min(0).sum()
    figures: dict[str, Any] = {
        "size": float(share.norm() / head.norm()),
        "cosine": cosine(share, head),
        "again": cosine(share, last),
        "scale": float((share * last).sum() / last.square().sum()),
    }
    shares: Mapping[str, Tensor | float] = dict(zip(KNOWN, (0.0, last, share), strict=True))
    for name, assumed in shares.items():
        drift, extra = weights_of(model, optimizer, batch, assumed)
        step = predict(optimizer, weight, batch.whole(weight, extra)).step
        harm = batch.drift(step).clamp_min(0).sum()
        figures[name] = {
            "step": off(predict(optimizer, weight, head + assumed).step, true_step),
            "drift": off(drift, true_drift),
            "sign": float(((drift > 0) == (true_drift > 0)).double().mean()),
            # Undefined if no sample needs a weight.
            "weights": cosine(extra, true_weights) if true_weights.any() else math.nan,
            "removed": float(1 - harm / plain_harm),
        }
    return figures


def train(
    text: Text, size: tuple[int, int], kind: str, arm: str, seed: int, options: argparse.Namespace
) -> tuple[float, list[dict[str, Any]]]:
    """Final test loss and, if `arm` is "head alone", measurements at some steps."""
    torch.manual_seed(seed)
    rng, found = torch.Generator().manual_seed(1000 + seed), []
    model = Gpt(text.size, size[1])
    weight = model.lm_head.weight
    optimizer = OPTIMIZERS[kind](model.parameters())
    last = torch.zeros_like(weight)
    for step in range(options.steps):
        batch = forward(model, text.batch(*size, rng))
        if arm == "head alone" and step and step % options.every == 0:
            found.append(moment(model, optimizer, batch, last))
        extra: Tensor | float = 0.0
        if arm != "plain":
            share: Tensor | float = 0.0 if arm == "head alone" else last
            if arm == "whole":
                share = batch.whole(weight) - batch.share_of_head()
            extra = weights_of(model, optimizer, batch, share)[1]
        optimizer.zero_grad()
        ((1 + extra) * batch.losses).mean().backward()
        assert weight.grad is not None
        last = weight.grad - batch.share_of_head(extra)
        optimizer.step()
    with torch.no_grad():
        held_out = text.batch(256, size[1], torch.Generator().manual_seed(0), test=True)
        logits = model(held_out[:, :-1]).flatten(0, 1)
        return float(F.cross_entropy(logits, held_out[:, 1:].flatten())), found


def mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN."""
    return float(torch.tensor(values, dtype=torch.float64).nanmean())


def summarised(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the measured steps."""
    first = found[0]
    return {
        name: (
            {key: mean([each[name][key] for each in found]) for key in first[name]}
            if isinstance(first[name], dict)
            else mean([each[name] for each in found])
        )
        for name in first
    }


def case(
    text: str, kind: str, options: argparse.Namespace, bar: tqdm[Any]
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One text and optimizer: means of the measurements, and test losses by arm."""
    source = characters() if text == "characters" else words(options.vocabulary)
    found: list[dict[str, Any]] = []
    losses: dict[str, list[float]] = {arm: [] for arm in ("plain", *KNOWN)}
    for seed in range(options.seeds):
        for arm in losses:
            loss, moments = train(source, options.texts[text], kind, arm, seed, options)
            losses[arm].append(loss)
            found += moments
            bar.update()
    return summarised(found), losses


SHARES = ("text", "optimizer", "share's size / head's", "cosine with head's",
          "cosine with last share")  # fmt: skip
PREDICTED = ("text", "optimizer", "known of the gradient", "step off by %", "drift off by %",
             "harmed or not: right %", "cosine of weights", "harm removed %")  # fmt: skip
TRAINED = ("text", "optimizer", "plain", *KNOWN, "spread of head alone - whole")


def tables(cases: Mapping[tuple[str, str], Any]) -> list[tuple[Sequence[str], list[list[str]]]]:
    shares, predicted, trained = [], [], []
    for (text, kind), (found, losses) in cases.items():
        figures = [f"{found[name]:.2f}" for name in ("size", "cosine", "again")]
        shares.append([text, kind, *figures])
        for known in KNOWN:
            own = found[known]
            percent = [f"{100 * own[name]:.0f}" for name in ("step", "drift", "sign")]
            ends = f"{own['weights']:.2f}", f"{100 * own['removed']:.0f}"
            predicted.append([text, kind, known, *percent, *ends])
        pairs = zip(losses["head alone"], losses["whole"], strict=True)
        apart = torch.tensor([one - other for one, other in pairs], dtype=torch.float64)
        spread = f"{apart.mean():+.4f} ± {apart.std(correction=int(len(apart) > 1)):.4f}"
        trained.append([text, kind, *(f"{mean(each):.3f}" for each in losses.values()), spread])
    return [(SHARES, shares), (PREDICTED, predicted), (TRAINED, trained)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = make_parser("tied.py", __doc__, quick="one seed, few steps: seconds")
    return parse_quick(made, argv, FULL, QUICK)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with use_threads(1):
        report = Report("tied.py", argv, options.out)
        total = len(options.texts) * len(OPTIMIZERS) * options.seeds * (1 + len(KNOWN))
        with tqdm(total=total, desc="runs", unit="run", dynamic_ncols=True) as bar:
            cases = {
                (text, kind): case(text, kind, options, bar)
                for text in options.texts
                for kind in OPTIMIZERS
            }
    setting = (
        f"GPT of 2 layers and width 64, head and embedding tied, on Python's help; tokens as "
        f"samples, radius {RADIUS}; {options.steps} steps, seeds: {options.seeds}; every "
        f"{options.every}th step looked at; sequences and length: {options.texts}; words: "
        f"{options.vocabulary}."
    )
    content = [
        {"text": text, "optimizer": kind, "found": found, "losses": losses}
        for (text, kind), (found, losses) in cases.items()
    ]
    report.save({"setting": setting, "cases": content}, *tables(cases), setting)
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
