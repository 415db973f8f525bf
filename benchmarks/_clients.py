"""What the scripts of the clients study share: one run of one script, its data, its clock."""

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
from primum import Reducer, StepReport

NOISE = 0.5  # clean, the digits are learned in no time


@dataclass
class Run:
    """One run of a script, with or without the line.

    A script calls `attach` where a user would write `primum.attach`; without `settings` that adds
    nothing. The time of a step is the process time from one step of the optimizer to the next.

    Attributes:
        seed: Of everything random in the run.
        settings: Keyword arguments of `primum.attach`; None for plain training.
        quick: Whether a few steps will do.
        paused: Whether passes for another network are put into `reducer.paused()`.
        data_dir: A folder with CIFAR-10 as Parquet files, if there is one.
        extra: Further figures of the run.
        units: By which the time of a step is divided, as for an episode of so many moves.
        steps: Seconds of each.
        harmed: Fraction of samples that the plain step would harm, in every tenth step.
        reducer: What `attach` returned, if anything is attached.
        callback: The framework's callback in its place.
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
        """Take the time of its steps. Of a wrapper, the one inside is watched."""
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
        """So many steps, or a few if it is to be quick."""
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
        name: As in the table.
        pattern: What kind of public script it follows.
        play: Runs it and returns the figure that counts.
        arms: What is added, as a user would write it, and the settings that it means.
        figure: What the figure is.
        more_is_better: Whether a larger figure is a better one.
        seeds: How many.
    """

    name: str
    pattern: str
    play: Callable[[Run], float]
    arms: dict[str, dict[str, Any]]
    figure: str = "test loss"
    more_is_better: bool = False
    seeds: int = 5


def started(run: Run) -> torch.Generator:
    """Seeds torch; returns a generator for data, the same with and without the line."""
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
    """Images [N, C, H, W] of mean 0 and deviation about 1, labels [N]."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def images(run: Run) -> Images:
    """CIFAR-10 if its folder was given; otherwise the digits of scikit-learn, with noise."""
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
def cifar10(folder: Path, train: int = 4000, test: int = 2000) -> Images:
    """The first images of `train-*.parquet` and `test-*.parquet`, columns `img` and `label`."""
    import io

    import numpy as np
    from PIL import Image
    from pyarrow import parquet

    def load(part: str, count: int) -> tuple[Tensor, Tensor]:
        rows = parquet.read_table(next(folder.glob(f"{part}-*.parquet"))).slice(0, count)
        files = (io.BytesIO(each["bytes"]) for each in rows["img"].to_pylist())
        pixels = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))
        labels = torch.tensor(rows["label"].to_pylist())
        return (pixels.permute(0, 3, 1, 2).float() / 255 - 0.47) / 0.25, labels

    return Images(*load("train", train), *load("test", test))


@dataclass(frozen=True)
class Text:
    """Numbers of characters or words, of which there are `size` kinds."""

    train: Tensor
    test: Tensor
    size: int

    def batch(self, rows: int, length: int, rng: torch.Generator, *, test: bool = False) -> Tensor:
        """Random windows, each with the word after its end. [rows, length + 1]."""
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
    """The most frequent `size` symbols, all others as one; the last tenth is for testing."""
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
    """What primum warned about."""
    return [str(each.message) for each in caught if "primum" in str(each.message)]
