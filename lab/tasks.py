"""Data, model and batches of a run, for both tasks: images and language."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn

from lab.augment import AUGMENTATIONS
from lab.epochs import Epochs
from lab.images import Batches, ImageData, load_data
from lab.images.batches import first_images
from lab.models import build_language_model, build_model, find_model
from lab.models.language import find_language_model
from lab.models.whitened import WhitenedCNN
from lab.settings import RunSettings
from lab.texts import TextData, load_text
from lab.torchrun import Ranks
from lab.windows import Windows

Data: TypeAlias = ImageData | TextData
TEST_IMAGES = 500  # per evaluation batch
TEST_TOKENS = 8192


def load(
    settings: RunSettings,
    data_dir: str | None = None,
    cache_dir: str | None = None,
    text: str | None = None,
) -> Data:
    """The data of a run.

    Args:
        settings: Settings of the run.
        data_dir: Folder of the data.
        cache_dir: Folder for decoded images.
        text: File of a text that is not built in.
    """
    if settings.task == "language":
        return load_text(settings.text_settings(data_dir, text))
    return load_data(settings.data_settings(data_dir, cache_dir))


def known_sizes(settings: RunSettings) -> tuple[int, int] | None:
    """The sizes that a model is built from, if known without loading data."""
    if settings.task == "language":
        return settings.vocabulary, settings.length
    return settings.data_settings().known_shape


def build(settings: RunSettings, sizes: tuple[int, int]) -> nn.Module:
    """The model of a run, from classes and image size, or vocabulary size and length."""
    if settings.task == "language":
        return build_language_model(settings.model, *sizes, seed=settings.seed)
    return build_model(settings.model, *sizes, norm=settings.norm, seed=settings.seed)


def sizes_of(settings: RunSettings, data: Data) -> tuple[int, int]:
    """The sizes that a model is built from, from the data."""
    if isinstance(data, TextData):
        return data.classes, settings.length
    return data.classes, data.image_size


def initial_model(settings: RunSettings, data: Data) -> nn.Module:
    """The model of a run before its first step, with its whitening layer, if any, initialised."""
    model = build(settings, sizes_of(settings, data))
    if isinstance(model, WhitenedCNN) and isinstance(data, ImageData):
        model.whiten(first_images(data))
    return model


def check_name(settings: RunSettings) -> None:
    """Raise for a model that does not exist."""
    if settings.task == "language":
        find_language_model(settings.model)
    else:
        find_model(settings.model, settings.norm)


def train_batches(settings: RunSettings, data: Data, ranks: Ranks, workers: int) -> Epochs:
    """The training batches."""
    if isinstance(data, TextData):
        return Windows(
            data.train,
            length=settings.length,
            batch_size=settings.batch_size,
            seed=settings.seed,
            workers=workers,
            rank=ranks.rank,
            ranks=ranks.size,
        )
    return Batches(
        data.train,
        data,
        AUGMENTATIONS[settings.augment],
        batch_size=settings.batch_size,
        seed=settings.seed,
        stream=settings.order == "stream",
        workers=workers,
        rank=ranks.rank,
        ranks=ranks.size,
    )


def evaluation_batches(
    settings: RunSettings, data: Data, workers: int, batch_size: int | None = None
) -> Epochs:
    """Batches of test images or held-out text, in order."""
    if isinstance(data, TextData):
        return Windows(
            data.test,
            length=settings.length,
            batch_size=batch_size or max(1, TEST_TOKENS // settings.length),
            shuffle=False,
            drop_last=False,
            workers=workers,
        )
    return Batches(
        data.test,
        data,
        batch_size=batch_size or TEST_IMAGES,
        shuffle=False,
        drop_last=False,
        workers=workers,
    )
