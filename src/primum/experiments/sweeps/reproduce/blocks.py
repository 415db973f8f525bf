"""Figure 11: explicit gradients of more and more last blocks, with all extra weights zero."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from primum.experiments.images import Batches, DataSettings, ImageData, load_data
from primum.experiments.images.batches import Batch
from primum.experiments.inspection.moment import evaluate
from primum.experiments.models.resnet import CifarResNet
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.findings import Finding, Scale, judge
from primum.experiments.sweeps.reproduce.parts import Part, make_part, plain_data
from primum.paper import PaperSettings
from primum.paper.multilayer import MultiLayer, split

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
    """Plain training, then with explicit gradients of the last 1, 2, ... blocks; each is kept."""
    size = size_of(scale, place)
    data = load_data(size.data)
    found = []
    for tail in (0, *size.tails):
        start = partial(TailTraining, tail, size, data, torch.device(device))
        found.append(Measured(**make_part(part_of(tail, size, device), place, start)))
    return judge_blocks(found, scale)


def part_of(tail: int, size: Size, device: str) -> Part:
    """What one length of the tail depends on; which other lengths there are is no part of it."""
    settings = asdict(size) | {"data": plain_data(size.data), "tail": tail}
    del settings["tails"]
    label = f"last {tail} block(s)" if tail else "plain training"
    return Part(f"multilayer-tail{tail}", label, settings, device)


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


class TailTraining:
    """Training with explicit gradients of the last `tail` blocks; 0 is `loss.backward()`."""

    def __init__(self, tail: int, size: Size, data: ImageData, device: torch.device) -> None:
        self.tail, self.data, self.device = tail, data, device
        self.model = build_network(data.classes, size.blocks).to(device)
        self.step = TailStep(self.model, tail)
        self.batches = Batches(data.train, data, batch_size=size.batch)
        self.total = size.epochs * len(self.batches)
        self.times: list[float] = []  # of each step, seconds
        self._epoch: Iterator[Batch] | None = None

    @property
    def done(self) -> int:
        """Steps taken."""
        return len(self.times)

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.done >= self.total

    def advance(self) -> None:
        """Take a step."""
        epoch, first = divmod(self.done, len(self.batches))
        if self._epoch is None or first == 0:
            self._epoch = self.batches.epoch(epoch, first)
        batch = next(self._epoch).to(self.device)
        _wait(self.device)
        begin = perf_counter()
        self.step(batch.images, batch.targets)
        _wait(self.device)
        self.times.append(perf_counter() - begin)

    def result(self) -> dict[str, Any]:
        """`Measured` of the trained model."""
        test = Batches(self.data.test, self.data, batch_size=500, shuffle=False, drop_last=False)
        model = self.model.cpu()
        _, accuracy = evaluate(model, test.epoch(0))
        first = next(self.batches.epoch(0))
        memory = peak_memory(copy.deepcopy(model), self.tail, first.images, first.targets)
        return asdict(Measured(self.tail, accuracy, 1e3 * median(self.times), memory))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: loads with `weights_only=True`."""
        return {
            "model": self.model.state_dict(),
            "step": self.step.state_dict(),
            "times": torch.tensor(self.times, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a training of the same settings; times measured so far count."""
        self.model.load_state_dict(state["model"])
        self.step.load_state_dict(state["step"])
        self.times = state["times"].tolist()
        self._epoch = None


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


class TailStep:
    """A training step by SGD, with explicit gradients of the last `tail` blocks."""

    def __init__(self, model: nn.Sequential, tail: int) -> None:
        self.optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.forward: nn.Module = model
        self.explicit: MultiLayer | None = None
        if tail > 0:
            self.forward, last = split(model, tail)
            settings = PaperSettings(radius=0.0)
            self.explicit = MultiLayer(last, self.optimizer, F.cross_entropy, settings)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Images [B, 3, H, W], labels [B]."""
        self.optimizer.zero_grad()
        if self.explicit is None:
            F.cross_entropy(self.forward(images), labels).backward()  # type: ignore[no-untyped-call]
        else:
            self.explicit.backward(self.forward(images), labels)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer and the recipe; the model's own is apart."""
        recipe = None if self.explicit is None else self.explicit.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "recipe": recipe}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.explicit is not None:
            self.explicit.load_state_dict(state["recipe"])


def peak_memory(model: nn.Sequential, tail: int, images: Tensor, labels: Tensor) -> int:
    """Most bytes that torch held on the CPU during one step, over what it held before."""
    step = TailStep(model.train(), tail)
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
