"""Shared by the scripts of the clients study: a timed run, image data, text."""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import primum
from lab.bench._capture import read_parquet
from primum import Reducer, StepReport

NOISE = 0.5  # without noise the digits are too easy


@dataclass
class Run:
    """One run of a script, with or without primum.

    A script calls `attach` where a user would write `primum.attach`; without `settings` that does
    nothing. The time of a step is the process time between two optimizer steps.

    Attributes:
        seed: Seed of everything random in the run.
        settings: Keyword arguments of `primum.attach`; None for plain training.
        quick: Whether to take only a few steps.
        paused: Whether backward passes for another network are inside `reducer.paused()`.
        data_dir: A folder with CIFAR-10 as Parquet files, if there is one.
        extra: Further metrics of the run.
        units: Divisor of a step's time, such as the number of moves in an episode.
        steps: Seconds of each step.
        harmed: Fraction of samples that the plain step would harm, in every tenth step.
        reducer: The result of `attach`, if attached.
        callback: The framework's callback, if it is used instead.
        last: Report of the last step.
    """

    seed: int
    settings: dict[str, Any] | None
    quick: bool = False
    paused: bool = False
    data_dir: Path | None = None
    extra: dict[str, float] = field(default_factory=dict)
    units: int = 1
    steps: list[float] = field(default_factory=list)
    harmed: list[float] = field(default_factory=list)
    reducer: Reducer | None = None
    callback: Any = None
    last: StepReport | None = None
    _since: float | None = None

    def attach(self, model: Any, optimizer: Any, **fixed: Any) -> Reducer | None:
        if self.settings is not None:
            self.reducer = primum.attach(model, optimizer, **(fixed | self.settings))
        self.watch(optimizer)
        return self.reducer

    def watch(self, optimizer: Any) -> None:
        """Time the steps of an optimizer, or of the optimizer inside a wrapper."""
        inner = optimizer
        while not isinstance(inner, Optimizer) or isinstance(
            getattr(inner, "optimizer", None), Optimizer
        ):
            inner = inner.optimizer
        me = weakref.ref(self)

        def after_step(*_: object) -> None:
            run = me()
            if run is not None:
                run._tick()

        inner.register_step_post_hook(after_step)

    def few(self, count: int) -> int:
        """`count` steps, or a few if the run is quick."""
        return min(count, 4) if self.quick else count

    def _tick(self) -> None:
        if self._since is not None:
            self.steps.append((process_time() - self._since) / self.units)
        source = self.reducer if self.callback is None else self.callback
        report: StepReport | None = None if source is None else source.last
        self.last = report or self.last
        if report is not None and report.applied and len(self.steps) % 10 == 0:
            self.harmed.append(float(report.harmed_before))
        self._since = process_time()


@dataclass(frozen=True)
class Script:
    """One script of the study.

    Attributes:
        name: Name in the table.
        pattern: The public script whose pattern it follows.
        play: Runs it and returns the metric.
        arms: Settings of `primum.attach`, by the code that a user would write.
        figure: Name of the metric.
        more_is_better: Whether higher is better.
        seeds: Number of seeds.
    """

    name: str
    pattern: str
    play: Callable[[Run], float]
    arms: dict[str, dict[str, Any]]
    figure: str = "test loss"
    more_is_better: bool = False
    seeds: int = 5


def started(run: Run) -> torch.Generator:
    """Seed torch; return a generator for data, the same with and without primum."""
    torch.manual_seed(run.seed)
    return torch.Generator().manual_seed(1000 + run.seed)


def shuffled(count: int, batch: int, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of whole batches, epoch after epoch."""
    done = 0
    while True:
        for rows in torch.randperm(count, generator=rng).split(batch):
            if len(rows) == batch:
                if done == steps:
                    return
                done += 1
                yield rows


@dataclass(frozen=True)
class Images:
    """Images [N, C, H, W] of mean 0 and standard deviation about 1, labels [N]."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def images(run: Run) -> Images:
    """CIFAR-10 if its folder is given, else scikit-learn's digits with noise."""
    return noisy_digits() if run.data_dir is None else cifar10(run.data_dir)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images in a fixed random order, in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return pixels[order], torch.tensor(data.target)[order]


@cache
def noisy_digits(train: int = 640) -> Images:
    pixels, labels = digits()
    pixels = (pixels - pixels.mean()) / pixels.std()
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    pixels = pixels + NOISE * noise
    return Images(pixels[:train], labels[:train], pixels[train:], labels[train:])


@cache
def cifar10(folder: Path) -> Images:
    """The first 4,000 training and 2,000 test images."""
    parts = []
    for part, count in (("train", 4000), ("test", 2000)):
        pixels, labels = read_parquet(folder, "cifar10", part, count)
        parts += [(pixels / 255 - 0.47) / 0.25, labels]
    return Images(*parts)


@dataclass(frozen=True)
class Text:
    """Characters or words as integers below `size`."""

    train: Tensor
    test: Tensor
    size: int

    def batch(self, rows: int, length: int, rng: torch.Generator, *, test: bool = False) -> Tensor:
        """Random windows, each with the symbol that follows. [rows, length + 1]."""
        text = self.test if test else self.train
        starts = torch.randint(len(text) - length, (rows,), generator=rng)
        return torch.stack([text[start : start + length + 1] for start in starts])


@cache
def paragraphs() -> list[tuple[str, str]]:
    """Topic and text of every paragraph of Python's own help, each once, in a random order."""
    seen: dict[str, str] = {}
    for name, text in sorted(topics.items(), key=lambda item: len(item[1])):
        for paragraph in re.split(r"\n\s*\n", text):
            if len(paragraph) > 80:
                seen.setdefault(re.sub(r"\s+", " ", paragraph), name)
    found = [(name, text) for text, name in seen.items()]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[place] for place in order]


def split(symbols: list[list[str]], size: int | None) -> Text:
    """Encode the `size` most frequent symbols, the others as one; the last tenth is for testing."""
    flat = [symbol for paragraph in symbols for symbol in paragraph]
    common = [symbol for symbol, _ in Counter(flat).most_common(size and size - 1)]
    number = {symbol: place for place, symbol in enumerate(common, 1)}
    encoded = torch.tensor([number.get(symbol, 0) for symbol in flat])
    end = len(encoded) * 9 // 10
    return Text(encoded[:end], encoded[end:], len(number) + 1)


@cache
def characters() -> Text:
    return split([[*text, "\n"] for _, text in paragraphs()], None)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^\sa-z]", text.lower())


@cache
def words(size: int | None = None) -> Text:
    return split([[*words_of(text), "\n"] for _, text in paragraphs()], size)


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    """Messages of primum's warnings."""
    return [str(each.message) for each in caught if "primum" in str(each.message)]
