"""Capture problems in training: data, two small models, and a recipe that records its inputs."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import primum
from primum.kernel.gram import MatrixFree
from primum.kernel.head import Head
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Solution, StepProblem
from primum.kernel.recipe import Primum, Recipe
from primum.paper import Paper

BASE_BATCH = 128  # the paper's; learning rates scale with the square root of the batch size
LABELS = {"cifar10": "label", "cifar100": "fine_label"}


@dataclass(frozen=True)
class Data:
    """Images [N, channels, side, side] of mean 0 and deviation 1, labels [N].

    Batches are augmented with noise (digits) or with flips and shifts (CIFAR), so that samples are
    not memorised and some are still harmed.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: int

    def batches(self, size: int, count: int, generator: torch.Generator) -> Iterator[Any]:
        """`count` pairs of images and labels; every epoch has each sample once."""
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(count):
            while len(order) < size:
                order = torch.cat([order, torch.randperm(len(self.labels), generator=generator)])
            rows, order = order[:size], order[size:]
            images = self.images[rows]
            if self.name == "digits":
                images = images + torch.randn(images.shape, generator=generator)
            else:
                flip = torch.rand(size, generator=generator) < 0.5
                images = torch.where(flip.view(-1, 1, 1, 1), images.flip(-1), images)
                down, right = torch.randint(9, (2,), generator=generator).tolist()
                side = images.shape[-1]
                images = F.pad(images, (4,) * 4)[..., down : down + side, right : right + side]
            yield images, self.labels[rows]


def digits() -> Data:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    return Data("digits", _standard(images), torch.tensor(labels), 10)


def cifar(folder: Path, name: str, most: int) -> Data:
    """The first `most` training images of CIFAR."""
    images, labels = read_parquet(folder, name, "train", most)
    return Data(name, _standard(images), labels, 100 if name == "cifar100" else 10)


def read_parquet(folder: Path, name: str, split: str, most: int) -> tuple[Tensor, Tensor]:
    """The first images [N, 3, H, W] of CIFAR, in [0, 255], and their labels [N].

    `folder` holds Parquet files with PNG images, such as `train-*.parquet`, or a folder of the
    dataset's name that does.
    """
    try:
        import pyarrow.parquet as parquet
        from PIL import Image
    except ImportError as error:
        raise SystemExit(
            f"reading {name} needs pyarrow and pillow: pip install pyarrow pillow ({error})"
        ) from None
    import numpy as np

    files = f"{split}-*.parquet"
    found = sorted(folder.glob(files)) or sorted(folder.glob(f"{name}/{files}"))
    if not found:
        raise SystemExit(f"no {files} of {name} in {folder}; see --data-dir")
    table = parquet.read_table(found[0], columns=["img", LABELS[name]]).slice(0, most)
    pictures = (Image.open(io.BytesIO(row["bytes"])) for row in table["img"].to_pylist())
    pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    return images, torch.tensor(table[LABELS[name]].to_pylist())


def _standard(images: Tensor) -> Tensor:
    return (images - images.mean()) / images.std()


def group_norm_cnn(channels: int, side: int, classes: int) -> nn.Module:
    """Three convolutions with group norm, then a head with 64 inputs."""
    body: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate([(channels, 16), (16, 32), (32, 64)]):
        stride = 2 if side > 8 or number else 1
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        body += [conv, nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Transformer(nn.Module):
    """Sixteen patches, two blocks, mean of the tokens, layer norm, head."""

    def __init__(self, channels: int, side: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.patch = side // 4
        self.embed = nn.Linear(channels * self.patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, side, side] -> [B, classes]."""
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        tokens = self.blocks(self.embed(patches) + self.position)
        logits: Tensor = self.head(self.norm(tokens.mean(1)))
        return logits


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "sgd": group_norm_cnn,
    "adamw": Transformer,
}


def optimizer_of(kind: str, model: nn.Module, batch: int = BASE_BATCH) -> Optimizer:
    """SGD or AdamW at the paper's rates: 0.1 and 0.001 at B = 128, by square-root scaling."""
    grown = math.sqrt(batch / BASE_BATCH)
    if kind == "sgd":
        return SGD(model.parameters(), lr=0.1 * grown, momentum=0.9, weight_decay=1e-4)
    return AdamW(model.parameters(), lr=1e-3 * grown, weight_decay=5e-5)


@dataclass(frozen=True)
class Moment:
    """Inputs of a recipe in one step, and its state (the paper's guards) before it.

    Shapes: gram.features [B, d], update.step [d_out, d], drift [B].
    """

    number: int  # step number, from 1
    gram: MatrixFree
    update: Update
    drift: Tensor
    guards: dict[str, Any]


class Recorder(Recipe):
    """Wraps a recipe and records its inputs at some steps.

    Attributes:
        step: Number of the current step, from 1.
        moments: The record.
    """

    name = "recorder"
    products = 0  # needs the factors, which are recorded

    def __init__(self, at: Sequence[int], recipe: Recipe) -> None:
        self.step = 0
        self.moments: list[Moment] = []
        self.metric = recipe.metric
        self._at = set(at)
        self._inner = recipe
        self._update: Update | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record predicted steps as well; a recipe is only given their length."""
        update = Head.update

        def recorded(*args: Any, **settings: Any) -> Update:
            self._update = update(*args, **settings)
            return self._update

        with mock.patch.object(Head, "update", recorded):
            yield

    def __call__(self, problem: StepProblem) -> Solution:
        if self.step in self._at:
            assert isinstance(problem.gram, MatrixFree)
            assert self._update is not None
            given = problem.gram, self._update, problem.drift, self._inner.state_dict()
            self.moments.append(Moment(self.step, *copy.deepcopy(given)))
        return self._inner(problem)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


def evenly(count: int, steps: int) -> list[int]:
    """`count` evenly spaced steps from the second to the last.

    The first step is left out: the optimizer has no state yet, so it follows the mean gradient.
    """
    return sorted({round(float(n)) for n in torch.linspace(min(2, steps), steps, count)})


def record(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    at: Sequence[int],
    *,
    plain: bool = False,
) -> Iterator[list[Moment]]:
    """Train with the paper's recipe, or without weights; yield the record so far after each step.

    Plain training is observed at the recorded steps alone.
    """
    recorder = Recorder(at, Primum(radius=0.0) if plain else Paper())
    scheduler = CosineAnnealingLR(optimizer, steps)
    with primum.attach(model, optimizer, recipe=recorder) as reducer, recorder.watching():
        for recorder.step, (inputs, labels) in enumerate(batches, 1):
            reducer.enabled = recorder.step in at or not plain
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()
            yield recorder.moments


def capture(
    kind: str, data: Data, batch: int, steps: int, at: Sequence[int], seed: int
) -> Iterator[list[Moment]]:
    """Train on `data` and record: a small CNN with SGD, or a transformer with AdamW."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[kind](data.images.shape[1], data.images.shape[-1], data.classes)
    generator = torch.Generator().manual_seed(seed)
    batches = data.batches(batch, steps, generator)
    yield from record(model, optimizer_of(kind, model, batch), batches, steps, at)
