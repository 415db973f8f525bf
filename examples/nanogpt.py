"""A small GPT on text that every Python has, with the one added line and without it, side by side.

Trains two copies of a character model on the language reference in `pydoc_data.topics`, one step of
each in turn, prints the loss on held-out text and draws it over steps and over time. About two
minutes on two cores. Needs matplotlib.

Run: python examples/nanogpt.py --steps 400 --seed 0 --radius 0.1
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum

LENGTH, BATCH = 64, 32  # characters of a sequence, sequences of a step
HELD_OUT = 0.1  # the end of the text, never trained on


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = self.attend(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters [B, T] -> logits [B, T, V]."""

    def __init__(self, vocabulary: int, *, width: int, depth: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Run:
    """A model in training: with the extra line, if `radius` is above 0."""

    def __init__(self, args: argparse.Namespace, vocabulary: int, radius: float) -> None:
        torch.manual_seed(args.seed)  # both copies start from the same parameters
        sizes = {"width": args.width, "depth": args.depth, "heads": args.heads}
        self.model = GPT(vocabulary, **sizes, tied=args.tied)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01
        )
        if radius > 0:
            # The one added line: extra weights for the tokens that a step would harm.
            primum.attach(self.model, self.optimizer, per="token", radius=radius)
        warm = max(1, args.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(
                (step + 1) / warm,
                0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / max(1, args.steps - warm)),
            ),
        )
        self.seconds = 0.0
        self.steps: list[int] = []
        self.times: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        begin = perf_counter()
        self.model.train()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds += perf_counter() - begin

    @torch.no_grad()
    def evaluate(self, step: int, tokens: Tensor, targets: Tensor) -> None:
        self.model.eval()
        losses = [
            F.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
            for x, y in zip(tokens.split(64), targets.split(64), strict=True)
        ]
        self.steps.append(step)
        self.times.append(self.seconds)
        self.losses.append(sum(losses) / targets.numel())


def plot(runs: dict[str, Run], path: Path) -> None:
    """Held-out loss over steps and over seconds of training, without evaluation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        by_steps.plot(run.steps, run.losses, marker="o", markersize=3, label=name)
        by_time.plot(run.times, run.losses, marker="o", markersize=3, label=name)
    by_steps.set_xlabel("step")
    by_time.set_xlabel("seconds of training")
    by_steps.set_ylabel("held-out loss, nats per character")
    by_steps.legend()
    figure.savefig(path, dpi=130)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT with primum and without it.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--radius", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--plot", type=Path, default=Path("nanogpt.png"), metavar="FILE")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, Run]:
    args = arguments(given)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    data = torch.tensor([numbers[character] for character in text])
    train, test = data[: int((1 - HELD_OUT) * len(data))], data[int((1 - HELD_OUT) * len(data)) :]
    test = test[: LENGTH * 256 + 1]
    held_out = test[:-1].view(-1, LENGTH), test[1:].view(-1, LENGTH)
    print(f"{len(train):,} characters to train on, {len(characters)} different ones")

    runs = {
        "plain": Run(args, len(characters), 0.0),
        f"primum, radius {args.radius:g}": Run(args, len(characters), args.radius),
    }
    print(f"\n{'step':>5}  " + "  ".join(f"{name:>20}" for name in runs))
    batches = torch.Generator().manual_seed(args.seed)
    every = max(1, args.steps // 10)
    for step in range(1, args.steps + 1):
        first = torch.randint(len(train) - LENGTH, (BATCH, 1), generator=batches)
        places = first + torch.arange(LENGTH)
        for run in runs.values():  # in turn: whatever else the machine does slows both
            run.step(train[places], train[places + 1])
        if step % every == 0 or step == args.steps:
            for run in runs.values():
                run.evaluate(step, *held_out)
            print(f"{step:>5}  " + "  ".join(f"{run.losses[-1]:>20.3f}" for run in runs.values()))

    print(f"\n{'':20}  {'held-out loss':>13}  {'ms per step':>11}")
    for name, run in runs.items():
        print(f"{name:20}  {run.losses[-1]:>13.3f}  {1e3 * run.seconds / args.steps:>11.1f}")
    plot(runs, args.plot)
    print(f"\nPlot: {args.plot}")
    return runs


if __name__ == "__main__":
    main()
