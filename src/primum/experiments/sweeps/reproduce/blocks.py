"""Figure 11: explicit gradients of more and more last blocks, with all extra weights zero."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from primum.experiments.images import Batches, DataSettings, ImageData, load_data
from primum.experiments.inspection.moment import evaluate
from primum.experiments.models.resnet import CifarResNet
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.findings import Finding, Scale, judge
from primum.paper import PaperSettings
from primum.paper.multilayer import MultiLayer, split

Step = Callable[[Tensor, Tensor], None]  # images [B, 3, H, W], labels [B]

SUBSTANTIAL = 1.5  # how much more most blocks must take than one to count as substantial


@dataclass(frozen=True)
class Size:
    """How much of it: training images, batch size, epochs, ResNet blocks per stage, tails."""

    data: DataSettings
    batch: int
    epochs: int
    blocks: int
    tails: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """One length of the tail; 0 is plain training."""

    tail: int
    accuracy: float
    milliseconds: float
    peak_bytes: int


class Pool(nn.Module):
    """Mean over the image, as a layer of its own."""

    def forward(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C]."""
        return features.mean(dim=(2, 3))


def size_of(scale: Scale, place: Place) -> Size:
    """full: ResNet-20 on CIFAR-10, B = 128, 164 epochs."""
    if scale == "smoke":
        data = DataSettings("generated", train_size=16, test_size=16, image_size=16)
        return Size(data, 8, 1, 1, (1, 3))
    if scale == "small":
        data = DataSettings(
            "cifar10", place.data_dir, place.cache_dir, train_size=1280, test_size=2000
        )
        return Size(data, 64, 3, 3, (1, 3, 6, 11))
    data = DataSettings("cifar10", place.data_dir, place.cache_dir)
    return Size(data, 128, 164, 3, tuple(range(1, 12)))


def run_blocks(scale: Scale, place: Place, device: str = "cpu") -> list[Finding]:
    """Plain training, then with explicit gradients of the last 1, 2, ... blocks."""
    size = size_of(scale, place)
    data = load_data(size.data)
    found = [
        train_with(tail, size, data, torch.device(device))
        for tail in tqdm((0, *size.tails), desc="tails", disable=not sys.stderr.isatty())
    ]
    return judge_blocks(found, scale)


def judge_blocks(found: list[Measured], scale: Scale) -> list[Finding]:
    """The figure's statements."""
    plain, first, last = found[0], found[1], found[-1]
    slower = last.milliseconds / first.milliseconds
    larger = last.peak_bytes / max(1, first.peak_bytes)
    accuracies = [100 * each.accuracy for each in found]
    spread = max(accuracies) - min(accuracies)
    shown = ", ".join(f"{m.tail}: {100 * m.accuracy:.2f}" for m in found)
    return [
        Finding(
            f"time per batch, last {last.tail} blocks against the last one",
            "substantially more",
            f"{last.milliseconds:.0f} ms, {slower:.1f}x (plain {plain.milliseconds:.0f} ms)",
            judge(slower >= SUBSTANTIAL, scale),
        ),
        Finding(
            f"peak memory, last {last.tail} blocks against the last one",
            "substantially more",
            f"{last.peak_bytes / 2**20:.0f} MiB, {larger:.1f}x "
            f"(plain {plain.peak_bytes / 2**20:.0f} MiB)",
            judge(larger >= SUBSTANTIAL, scale),
        ),
        Finding(
            "test accuracy changes with the number of blocks, by rounding alone",
            "fluctuates",
            f"spread {spread:.2f} points ({shown})",
            judge(spread > 0, scale),
            "same seed, extra weights zero",
        ),
    ]


def train_with(tail: int, size: Size, data: ImageData, device: torch.device) -> Measured:
    """Train with explicit gradients of the last `tail` blocks; 0 is `loss.backward()`."""
    model = build_network(data.classes, size.blocks).to(device)
    batches = Batches(data.train, data, batch_size=size.batch)
    step = make_step(model, tail)
    times: list[float] = []
    for epoch in range(size.epochs):
        for batch in batches.epoch(epoch):
            images, labels = batch.images.to(device), batch.targets.to(device)
            _wait(device)
            begin = perf_counter()
            step(images, labels)
            _wait(device)
            times.append(perf_counter() - begin)
    test = Batches(data.test, data, batch_size=500, shuffle=False, drop_last=False)
    _, accuracy = evaluate(model.cpu(), test.epoch(0))
    first = next(iter(batches.epoch(0)))
    memory = peak_memory(copy.deepcopy(model), tail, first.images, first.targets)
    return Measured(tail, accuracy, 1e3 * median(times), memory)


def _wait(device: torch.device) -> None:
    """Until the device has done what it was told: a GPU works on by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_network(classes: int, blocks: int) -> nn.Sequential:
    """A ResNet for CIFAR as a chain of blocks; the last is the head, with the pooling before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = CifarResNet(classes, blocks=blocks)
    return nn.Sequential(net.stem, *net.stages, nn.Sequential(Pool(), net.head))


def make_step(model: nn.Sequential, tail: int) -> Step:
    """A training step by SGD, with explicit gradients of the last `tail` blocks."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if tail == 0:

        def plain(images: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return plain
    backbone, last = split(model, tail)
    explicit = MultiLayer(last, optimizer, F.cross_entropy, PaperSettings(radius=0.0))

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        explicit.backward(backbone(images), labels)
        optimizer.step()

    return step


def peak_memory(model: nn.Sequential, tail: int, images: Tensor, labels: Tensor) -> int:
    """Most bytes that torch held on the CPU during one step, over what it held before."""
    step = make_step(model.train(), tail)
    step(images, labels)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step(images, labels)
    kineto = seen.profiler.kineto_results if seen.profiler is not None else None
    assert kineto is not None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
