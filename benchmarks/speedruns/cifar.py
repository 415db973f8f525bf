"""CIFAR-10 speedrun for one GPU: base against radii, by accuracy and by time to a target.

The recipe of `primum reproduce speedrun` with wider layers. Images stay on the device and are
augmented there, so that nothing waits for the host. Nobody has run this on a GPU yet.

    python benchmarks/speedruns/cifar.py --data-dir DIR --target 0.94
    python benchmarks/speedruns/cifar.py --generated --widths 8 8 8 --epochs 1 --runs 1   # seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _measure import (
    Clock,
    Curve,
    Run,
    add_options,
    attach,
    check_arms,
    first_reached,
    peak_memory,
    table,
    write,
)

from primum.experiments.augment.crops import mirror
from primum.experiments.images import DataSettings, ImageData, load_data
from primum.experiments.models.whitened import WhitenedCNN
from primum.experiments.optimizers import make_optimizer
from primum.experiments.schedules import make_schedule
from primum.experiments.speedrun import recipe
from primum.experiments.views import views_logits

SHIFT = 2  # pixels of translation
EVALUATE = 2000  # images at a time


class OnDevice:
    """A split on the device: normalised images, augmented batch by batch."""

    def __init__(self, data: ImageData, split: str, device: torch.device) -> None:
        own = data.train if split == "train" else data.test
        assert isinstance(own.images, Tensor)
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (data.mean, data.std))
        images = (own.images.float() / 255 - mean) / std
        self.images = images.to(device).contiguous(memory_format=torch.channels_last)
        self.labels = own.labels.to(device)

    def epoch(self, epoch: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Translated and mirrored batches; a random half is mirrored, and then the other half."""
        device, count = self.images.device, len(self.labels)
        first = torch.Generator(device).manual_seed(2 * seed)
        generator = torch.Generator(device).manual_seed(2 * (seed + 1_000_003 * (epoch + 1)) + 1)
        turned = (torch.randint(2, (count,), generator=first, device=device) + epoch) % 2
        side = self.images.shape[-1]
        padded = F.pad(self.images, (SHIFT,) * 4, mode="reflect")
        rows = torch.arange(side, device=device)
        order = torch.randperm(count, generator=generator, device=device)
        for ids in order.split(batch_size)[: count // batch_size]:
            place = torch.randint(
                2 * SHIFT + 1, (2, len(ids), 1), generator=generator, device=device
            )
            y, x = place[0] + rows, place[1] + rows
            chosen = padded[ids[:, None, None], :, y[:, :, None], x[:, None, :]]  # [B, H, W, 3]
            yield mirror(chosen.permute(0, 3, 1, 2), turned[ids].bool()), self.labels[ids]


@torch.no_grad()
def accuracy(model: nn.Module, split: OnDevice, *, views: int) -> float:
    """Test accuracy: of the images as they are, or of several views each."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=split.labels.device)
    pairs = zip(split.images.split(EVALUATE), split.labels.split(EVALUATE), strict=True)
    for images, labels in pairs:
        logits = model(images) if views == 1 else views_logits(model, images, views)
        right += (logits.argmax(1) == labels).sum()
    model.train()
    return int(right) / len(split.labels)


def train(
    arm: str, seed: int, options: argparse.Namespace, train_set: OnDevice, test_set: OnDevice
) -> Run:
    """One run from its first step to its last."""
    device = torch.device(options.device)
    torch.manual_seed(seed)
    classes = int(train_set.labels.max()) + 1
    model = WhitenedCNN(classes, widths=tuple(options.widths))
    model.whiten(train_set.images[:5000].cpu())
    model.to(device)
    settings = recipe(
        options.epochs,
        lr=options.lr,
        weight_decay=options.weight_decay,
        batch_size=options.batch_size,
    )
    optimizer = make_optimizer(settings, model)
    per_epoch = len(train_set.labels) // options.batch_size
    steps = options.epochs * per_epoch
    warmup = min(steps - 1, round(settings.warmup * per_epoch))
    schedule = make_schedule(
        "linear", optimizer, steps=steps, warmup=warmup, floor=settings.lr_floor
    )
    reducer = attach(arm, model, optimizer, per="sample", compiled=options.compile)
    forward = torch.compile(model) if options.compile else model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock, curve, done = Clock(device), Curve(), 0
    precision = (
        nullcontext()
        if options.precision == "fp32"
        else torch.autocast(device.type, dtype=torch.bfloat16)
    )
    for epoch in range(options.epochs):
        clock.start()
        for images, labels in train_set.epoch(epoch, options.batch_size, seed):
            optimizer.zero_grad()
            with precision:
                logits = forward(images)
            F.cross_entropy(
                logits.float(), labels, label_smoothing=settings.label_smoothing
            ).backward()
            optimizer.step()
            schedule.step()
            done += 1
        seconds = clock.stop()
        with precision:
            curve.add(done, seconds, accuracy(model, test_set, views=1))
    with precision:
        final = accuracy(model, test_set, views=6)
    last = None if reducer is None else reducer.last
    fallbacks = 0 if last is None else int(last.fallbacks)
    reached = first_reached(curve, options.target, higher=True)
    peak = peak_memory(device)
    ms = 1e3 * clock.seconds / done
    if reducer is not None:
        reducer.remove()
    return Run(arm, seed, final, curve, reached, ms, peak, fallbacks)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all arms in turn, seed by seed; print a table and write every run."""
    parser = argparse.ArgumentParser(description="CIFAR-10 speedrun: base against radii.")
    add_options(parser, ("base", "0.1", "0.2", "0.4"), "speedrun-cifar.json")
    parser.add_argument("--data-dir", metavar="DIR", help="Parquet files of CIFAR-10; else the hub")
    parser.add_argument("--generated", action="store_true", help="a few made-up images instead")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--widths", type=int, nargs=3, default=[64, 256, 256], metavar="N")
    parser.add_argument("--lr", type=float, default=11.5, metavar="X",
                        help="decoupled, see README (%(default)s)")  # fmt: skip
    parser.add_argument("--weight-decay", type=float, default=0.0153, metavar="X", help="likewise")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args(argv)
    check_arms(parser, options.arms)
    made = DataSettings("generated", train_size=128, test_size=64, image_size=16)
    data = load_data(made if options.generated else DataSettings("cifar10", options.data_dir))
    if options.batch_size > len(data.train):
        parser.error(
            f"--batch-size is {options.batch_size}, but there are {len(data.train)} images"
        )
    device = torch.device(options.device)
    train_set, test_set = (OnDevice(data, split, device) for split in ("train", "test"))
    if device.type == "cuda" or options.compile:  # kernels are chosen and compiled before the clock
        short = argparse.Namespace(**vars(options) | {"epochs": 1})
        for arm in options.arms:
            train(arm, options.first_seed, short, train_set, test_set)
    runs: list[Run] = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        for arm in options.arms:
            runs.append(train(arm, seed, options, train_set, test_set))
            print(f"{arm}, seed {seed}: {100 * runs[-1].final:.2f}%", flush=True)
            write(options.out, "cifar.py", argv, runs)
    print(f"\n{table(runs, 'accuracy, % (six views)', scale=100)}\n\nRuns: {options.out.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
