"""`load_data`: load images as tensors, from settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from lab.images import made
from lab.images.cache import cached
from lab.images.decode import LazyImages, decode_table, lazy_images
from lab.images.parquet import open_table, parquet_files
from lab.images.select import add_label_noise, mean_and_std, subset
from lab.images.sources import DataError, DataSettings

IMAGENET_MEAN: tuple[float, ...] = (0.485, 0.456, 0.406)
IMAGENET_STD: tuple[float, ...] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Split:
    """Images (uint8 [N, 3, H, W], lazy, or float and used as they are) and labels [N] to train on.

    A sample's id is its index in this split.
    """

    images: Tensor | LazyImages
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """Both splits, class names, and mean and deviation per channel, on the scale 0 to 1.

    Mean and deviation are those of the selected training images; for lazy sources, ImageNet's.
    """

    settings: DataSettings
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def load_data(settings: DataSettings) -> ImageData:
    """Load, check and select images. The same settings always give the same data.

    Raises:
        DataError: the data cannot be used; the message has the reason and what to do.

    Example:
        >>> data = load_data(DataSettings("generated", train_size=64, label_noise=0.25))
        >>> data.train.images.shape, data.classes
        (torch.Size([64, 3, 32, 32]), 10)
    """
    train_images, train_labels, test_images, test_labels, names = _raw(settings)
    names = _check_classes(settings, names, train_labels, test_labels)
    train = _split(train_images, train_labels, len(names), settings, "train")
    test = _split(test_images, test_labels, len(names), settings, "test")
    if isinstance(train.images, LazyImages):
        mean, std, size = IMAGENET_MEAN, IMAGENET_STD, train.images.size
    elif train.images.is_floating_point():
        mean, std, size = (0.0,), (1.0,), train.images.shape[-1]
    else:
        mean, std = mean_and_std(train.images)
        size = train.images.shape[-1]
    return ImageData(settings, train, test, names, mean, std, size)


Images = Tensor | LazyImages
Raw = tuple[Images, Tensor, Images, Tensor, "tuple[str, ...] | None"]


def _raw(settings: DataSettings) -> Raw:
    if settings.name in ("digits", "noisy-digits"):
        make = made.digits if settings.name == "digits" else made.noisy_digits
        return *make(settings.train_size or 512), None
    if settings.name == "generated":
        return *made.generated(settings), _numbers(settings.classes or 10)
    if settings.source.lazy:
        tables = [open_table(settings, split, streaming=False) for split in ("train", "test")]
        train, test = (lazy_images(table, settings.image_size or 224) for table in tables)
        return *train, *test, tables[0].class_names
    # Only what determines the content: runs that differ otherwise share the decoded images.
    content = DataSettings(
        settings.name, settings.data_dir, settings.cache_dir, settings.label_column
    )
    (train_images, train_labels, names), (test_images, test_labels, _) = (
        _decoded(content, split, _origin(content, split)) for split in ("train", "test")
    )
    return train_images, train_labels, test_images, test_labels, names


@lru_cache(maxsize=4)  # these tensors are never written to
def _decoded(
    settings: DataSettings, split: str, origin: str
) -> tuple[Tensor, Tensor, tuple[str, ...] | None]:
    def make() -> dict[str, object]:
        table = open_table(settings, split, streaming=True)
        images, labels = decode_table(table)
        return {"images": images, "labels": labels, "names": list(table.class_names or ())}

    stored = cached(settings.cache_dir, f"{settings.name}-{split}", origin, make)
    return stored["images"], stored["labels"], tuple(stored["names"]) or None


def _origin(settings: DataSettings, split: str) -> str:
    """What the decoded images depend on; for files, also their sizes and modification times."""
    parts = [settings.name, split, str(settings.label_column)]
    if settings.data_dir is not None:
        for path in parquet_files(settings)[split]:
            about = path.stat()
            parts += [str(path.resolve()), str(about.st_size), str(about.st_mtime_ns)]
    return "\n".join(parts)


def _check_classes(
    settings: DataSettings, names: tuple[str, ...] | None, *labels: Tensor
) -> tuple[str, ...]:
    """The names of the classes, or their indices; raises for labels out of range."""
    seen = 1 + max(int(each.max()) for each in labels)
    known = settings.source.classes if settings.label_column is None else None
    names = names or _numbers(known or seen)
    if seen > len(names):
        raise DataError(
            f"{settings.name} has {len(names)} classes, numbered from 0, but a label is "
            f"{seen - 1}; check the data folder and the label column"
        )
    return names


def _numbers(classes: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(classes))


def _split(
    images: Images, labels: Tensor, classes: int, settings: DataSettings, part: str
) -> Split:
    size = settings.train_size if part == "train" else settings.test_size
    rows = subset(labels, size, classes, balanced=settings.balanced, part=part)
    if isinstance(images, LazyImages):
        images = replace(images, rows=images.rows[rows])
    elif len(rows) < len(images):
        images = images[rows]
    share = settings.label_noise if part == "train" else 0.0
    return Split(images, add_label_noise(labels[rows], share, classes, settings.noise_seed))
