"""Language-model speedrun for one GPU: steps to a validation loss, batch and architecture fixed.

One forward and one backward pass per step, the same tokens in the same order for every arm of a
seed; the arms differ only in the one added line. This has not been run on a GPU yet.

    python benchmarks/speedruns/language.py --train train.bin --validation val.bin --target 3.28
    python benchmarks/speedruns/language.py --width 16 --depth 1 --heads 2 --length 16 \\
        --batch-size 4 --steps 6 --every 3 --runs 1          # Python's language reference, seconds

A .bin file holds tokens as unsigned 16-bit integers; any other file is read as bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _gpt import GPT
from _measure import Clock, Curve, Run, add_options, attach, finished, precision, run_all

from primum.experiments.schedules import make_schedule

BYTES = 256
HELD_OUT = 0.1  # of the built-in text, for validation


def read_tokens(path: Path | None, part: str) -> np.ndarray:
    """Tokens [N] of a memory-mapped file, or of the language reference that comes with Python."""
    if path is None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        whole = np.frombuffer(text, dtype=np.uint8)
        cut = int(len(whole) * (1 - HELD_OUT))
        return whole[:cut] if part == "train" else whole[cut:]
    kind = np.uint16 if path.suffix == ".bin" else np.uint8
    return np.memmap(path, dtype=kind, mode="r")


def batch(tokens: np.ndarray, starts: Tensor, length: int, device: torch.device) -> Tensor:
    """Windows of `length + 1` tokens that begin at `starts`. [B, length + 1]."""
    rows = [tokens[start : start + length + 1].astype(np.int64) for start in starts.tolist()]
    made = torch.from_numpy(np.stack(rows))
    if device.type == "cuda":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def validate(
    model: nn.Module, tokens: np.ndarray, options: argparse.Namespace, device: torch.device
) -> float:
    """Mean loss over the same windows for all arms, seeds and steps."""
    model.eval()
    most = len(tokens) - options.length - 1
    places = torch.linspace(0, most, options.validation_batches * options.batch_size).long()
    losses = [
        loss_of(model, batch(tokens, starts, options.length, device))
        for starts in places.split(options.batch_size)
    ]
    model.train()
    return float(torch.stack(losses).double().mean())


def train(
    arm: str, seed: int, options: argparse.Namespace, tokens: np.ndarray, held_out: np.ndarray
) -> Run:
    """One run: all steps of the schedule, even if the target is reached earlier."""
    device = torch.device(options.device)
    torch.manual_seed(seed)
    model = GPT(
        options.vocabulary,
        length=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.heads,
    ).to(device)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    warmup = min(options.steps - 1, options.warmup)
    schedule = make_schedule("linear", optimizer, steps=options.steps, warmup=warmup)
    reducer = attach(arm, model, optimizer, per="token", compiled=options.compile)
    forward = torch.compile(model) if options.compile else model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(seed)
    clock, curve, autocast = Clock(device), Curve(), precision(options)
    most = len(tokens) - options.length - 1
    clock.start()
    for step in range(1, options.steps + 1):
        starts = torch.randint(most + 1, (options.batch_size,), generator=generator)
        windows = batch(tokens, starts, options.length, device)
        optimizer.zero_grad()
        with autocast:
            loss = loss_of(forward, windows)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % options.every == 0 or step == options.steps:
            seconds = clock.stop()
            with autocast:
                curve.add(step, seconds, validate(model, held_out, options, device))
            clock.start()
    return finished(arm, seed, curve.values[-1], curve, reducer, options, higher=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all arms in turn, seed by seed; print a table and write every run."""
    parser = argparse.ArgumentParser(description="Language-model speedrun: base against radii.")
    add_options(parser, ("base", "0.05", "0.1", "0.2"), "speedrun-language.json")
    whole = {"width": 768, "depth": 12, "heads": 12, "length": 1024, "batch-size": 16,
             "steps": 5000, "every": 125, "warmup": 250, "validation-batches": 20}  # fmt: skip
    for name, default in whole.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help="(%(default)s)"
        )
    parser.add_argument("--lr", type=float, default=6e-4, metavar="X", help="(%(default)s)")
    parser.add_argument(
        "--weight-decay", type=float, default=0.1, metavar="X", help="(%(default)s)"
    )
    parser.add_argument("--train", type=Path, metavar="FILE", help="tokens or text (default: "
                        "Python's language reference)")  # fmt: skip
    parser.add_argument("--validation", type=Path, metavar="FILE")
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="vocabulary size of .bin files, such as 50304"
    )
    options = parser.parse_args(argv)
    if (options.train is None) != (options.validation is None):
        parser.error("give both --train and --validation, or neither")
    tokens, held_out = (
        read_tokens(path, part)
        for path, part in ((options.train, "train"), (options.validation, "validation"))
    )
    if options.vocabulary is None:
        if tokens.dtype != np.uint8:
            parser.error("a .bin file needs --vocabulary, the size of the vocabulary")
        options.vocabulary = BYTES
    if min(len(tokens), len(held_out)) <= options.length + 1:
        parser.error(f"both texts must be longer than --length ({options.length}) tokens")
    train_on = partial(train, tokens=tokens, held_out=held_out)
    short = {"steps": 10, "every": 10}
    run_all(train_on, options, short, "language.py", argv, "validation loss")
    return 0


if __name__ == "__main__":
    sys.exit(main())
