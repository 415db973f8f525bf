"""CIFAR-10 speedrun for one GPU: base against radii, by accuracy and by time to a target.

The recipe of `primum reproduce speedrun` with wider layers. Images stay on the device and are
augmented there, so that nothing waits for the host. This has not been run on a GPU yet.

    python benchmarks/speedruns/cifar.py --data-dir DIR --target 0.94
    python benchmarks/speedruns/cifar.py --generated --widths 8 8 8 --epochs 1 --runs 1   # seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _measure import Clock, Curve, Run, add_options, attach, finished, precision, run_all

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
        """Translated and mirrored batches; which half is mirrored alternates between epochs."""
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
    """Test accuracy on the images as they are, or on several views of each."""
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
    """Train one run."""
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
    clock, curve, done, autocast = Clock(device), Curve(), 0, precision(options)
    for epoch in range(options.epochs):
        clock.start()
        for images, labels in train_set.epoch(epoch, options.batch_size, seed):
            optimizer.zero_grad()
            with autocast:
                logits = forward(images)
            F.cross_entropy(
                logits.float(), labels, label_smoothing=settings.label_smoothing
            ).backward()
            optimizer.step()
            schedule.step()
            done += 1
        seconds = clock.stop()
        with autocast:
            curve.add(done, seconds, accuracy(model, test_set, views=1))
    with autocast:
        final = accuracy(model, test_set, views=6)
    return finished(arm, seed, final, curve, reducer, options, higher=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all arms in turn, seed by seed; print a table and write every run."""
    parser = argparse.ArgumentParser(description="CIFAR-10 speedrun: base against radii.")
    add_options(parser, ("base", "0.1", "0.2", "0.4"), "speedrun-cifar.json")
    parser.add_argument("--data-dir", metavar="DIR", help="CIFAR-10 as Parquet (default: the hub)")
    parser.add_argument("--generated", action="store_true", help="a few generated images instead")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--widths", type=int, nargs=3, default=[64, 256, 256], metavar="N")
    for name, default in {"lr": 11.5, "weight-decay": 0.0153}.items():
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X",
                            help="decoupled, see README (%(default)s)")  # fmt: skip
    options = parser.parse_args(argv)
    made = DataSettings("generated", train_size=128, test_size=64, image_size=16)
    data = load_data(made if options.generated else DataSettings("cifar10", options.data_dir))
    if options.batch_size > len(data.train):
        parser.error(
            f"--batch-size is {options.batch_size}, but there are {len(data.train)} images"
        )
    device = torch.device(options.device)
    train_set, test_set = (OnDevice(data, split, device) for split in ("train", "test"))
    train_on = partial(train, train_set=train_set, test_set=test_set)
    metric = "accuracy, % (six views)"
    run_all(train_on, options, {"epochs": 1}, "cifar.py", argv, metric, scale=100)
    return 0


if __name__ == "__main__":
    sys.exit(main())
