"""`primum demo`: one small network, trained with and without primum over a few seeds.

Learning rate and weight decay were tuned without primum. The schedule is short on purpose: after 40
epochs both arms have fitted the training images, and faster training no longer shows.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import primum

TRAIN_SIZE, BATCH, NOISE = 512, 64, 0.5
ARMS = ("base", "primum")


@dataclass(frozen=True)
class Digits:
    """Images and labels. Shapes: float32 [N, 1, 8, 8], int64 [N]."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def noisy_digits() -> Digits:
    """Scikit-learn's handwritten digits with noise, the same in every call.

    Noise and few training images make them hard enough for training methods to differ.
    """
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    images = pixels[order].float().view(-1, 1, 8, 8)
    images = (images - images[:TRAIN_SIZE].mean()) / images[:TRAIN_SIZE].std()
    images += NOISE * torch.randn(images.shape, generator=generator)
    labels = labels[order].long()
    train, test = slice(TRAIN_SIZE), slice(TRAIN_SIZE, None)
    return Digits(images[train], labels[train], images[test], labels[test])


def group_norm_cnn(width: int = 16) -> nn.Sequential:
    """Three convolutions, the mean over all places, and a linear head."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.GroupNorm(4, outputs), nn.ReLU()]

    body = [*block(1, width, 1), *block(width, 2 * width, 2), *block(2 * width, 2 * width, 1)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(data: Digits, arm: str, seed: int, epochs: int) -> tuple[float, list[float]]:
    """Test accuracy after the last epoch, and the seconds of each step."""
    torch.manual_seed(seed)
    model = group_norm_cnn()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
    if arm == "primum":
        primum.attach(model, optimizer)
    schedule = CosineAnnealingLR(optimizer, epochs * (TRAIN_SIZE // BATCH))
    seconds = []
    for _ in range(epochs):
        for rows in torch.randperm(TRAIN_SIZE).view(-1, BATCH):
            start = process_time()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.images[rows]), data.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(process_time() - start)
            schedule.step()
    with torch.no_grad():
        right = model.eval()(data.test_images).argmax(1) == data.test_labels
    return float(right.float().mean()), seconds


def table(accuracy: dict[str, list[float]], seconds: dict[str, list[float]], epochs: int) -> str:
    """The result as a table and two sentences. Each arm has a value per seed."""
    from scipy import stats  # scikit-learn needs it, so it is there

    base, own = ([100 * value for value in accuracy[arm]] for arm in ARMS)
    gain = fmean(own) - fmean(base)
    shown, said = f"{gain:+.1f}", "one seed says little"
    if len(base) > 1:
        welch = stats.ttest_ind(own, base, equal_var=False).confidence_interval()
        shown += f" [{welch.low:+.1f}, {welch.high:+.1f}]"
        said = (
            "the interval does not contain 0"
            if welch.low > 0 or welch.high < 0
            else ("the interval contains 0, so no difference was seen")
        )
    added = median(seconds["primum"]) / median(seconds["base"]) - 1
    cells = (f"{fmean(base):.1f} %", f"{fmean(own):.1f} %", shown, f"{100 * added:+.0f} %")
    heads = ("base", "primum", "difference [95% interval]", "time per step")
    widths = [max(map(len, pair)) for pair in zip(heads, cells, strict=True)]
    rows = (heads, ["-" * width for width in widths], cells)
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"With primum, test accuracy after {epochs} epochs changed by {gain:+.1f} points over",
            f"{len(base)} seed(s): {said}.",
            "The network is tiny: in a larger one, primum takes a smaller share of a step.",
        ]
    )


def demo(seeds: int = 5, epochs: int = 15, say: Callable[[str], object] = print) -> int:
    """Train all runs and print the table; returns the exit code."""
    data = noisy_digits()
    say(
        f"Handwritten digits with noise, {TRAIN_SIZE} training images, group-norm CNN, SGD,\n"
        f"{epochs} epochs, {seeds} seed(s), one thread. Test accuracy after the last epoch:\n"
    )
    accuracy: dict[str, list[float]] = {arm: [] for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(seeds):
            for arm in ARMS:
                _progress(f"run {sum(map(len, accuracy.values())) + 1} of {2 * seeds}: {arm}")
                with warnings.catch_warnings():  # the table says how long primum takes
                    warnings.filterwarnings("ignore", "primum: computing sample weights takes")
                    right, took = train(data, arm, seed, epochs)
                accuracy[arm].append(right)
                seconds[arm] += took
    finally:
        torch.set_num_threads(threads)
        _progress("")
    say(table(accuracy, seconds, epochs))
    return 0


def diagnose_demo(say: Callable[[str], object] = print) -> int:
    """Diagnose the network of the demo, new, on the same digits; returns the exit code."""
    data = noisy_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = group_norm_cnn()
        rows = torch.randperm(TRAIN_SIZE).view(-1, BATCH)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
    say("Handwritten digits with noise, group-norm CNN, SGD.\nAfter 20 plain steps, the next 20:\n")

    def losses(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.images[rows]), data.labels[rows], reduction="none")

    say(str(primum.diagnose(model, optimizer, list(rows), losses)))
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text.ljust(40)}\r{text}", end="", file=sys.stderr, flush=True)
