"""Settings of what to load, and the known sources."""

from __future__ import annotations

from dataclasses import dataclass

from lab.errors import UserError, check_least


class DataError(UserError):
    """Data that cannot be used. The message has the problem, its location and a way to fix it."""


@dataclass(frozen=True)
class Source:
    """A data set: name on the Hugging Face hub, and expected properties.

    Images of a lazy source, of many sizes, stay encoded and are decoded batch by batch.
    """

    hub: str | None = None
    classes: int | None = None
    label_columns: tuple[str, ...] = ("label",)
    lazy: bool = False


SOURCES: dict[str, Source] = {
    # 60,000 images of 32 x 32 pixels.
    "cifar10": Source("uoft-cs/cifar10", 10),
    "cifar100": Source("uoft-cs/cifar100", 100, ("fine_label", "label")),
    # 110,000 images of 64 x 64 pixels (1.3 GB in memory).
    "tiny-imagenet": Source("zh-plus/tiny-imagenet", 200),
    # 131,689 photographs (on the hub: 160 pixels on the short side).
    "imagenet100": Source("clane9/imagenet-100", 100, lazy=True),
    # 1,797 handwritten digits of 8 x 8 pixels with noise, as RGB; the demo's: one channel, floats.
    "digits": Source(classes=10),
    "noisy-digits": Source(classes=10),
    # Noisy patterns.
    "generated": Source(),
}


@dataclass(frozen=True)
class DataSettings:
    """What to load, as plain values, so that settings can be stored and compared.

    Args:
        name: a key of `SOURCES`, or `owner/name` of another image data set on the hub.
        data_dir: a folder with Parquet files as on the hub, or one with a subfolder `name` that
            has them; None downloads from the hub.
        cache_dir: folder for decoded images; None keeps them in memory only. For lazy sources,
            the cache folder of Hugging Face `datasets`.
        label_column: the column of class indices, if not the usual one (such as `coarse_label`).
        train_size: number of training images; None is all (512 for digits and generated).
        test_size: number of test images; None is all (256 for generated).
        balanced: choose these evenly from all classes, instead of the first ones.
        label_noise: share of training labels replaced by another class, drawn uniformly.
        noise_seed: seed of the replaced labels.
        image_size: side of generated images (default 32) or of crops of a lazy source (224).
        classes: number of classes of generated images (default 10).
    """

    name: str = "cifar10"
    data_dir: str | None = None
    cache_dir: str | None = None
    label_column: str | None = None
    train_size: int | None = None
    test_size: int | None = None
    balanced: bool = False
    label_noise: float = 0.0
    noise_seed: int = 0
    image_size: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        if self.name not in SOURCES and "/" not in self.name:
            raise DataError(
                f"unknown data {self.name!r}; choose from {', '.join(SOURCES)}, "
                "or pass owner/name of a data set on the Hugging Face hub"
            )
        check_least(self, {"train_size": 1, "test_size": 1, "image_size": 1}, DataError)
        if not 0.0 <= self.label_noise <= 1.0:
            raise DataError(f"label_noise must be between 0 and 1, got {self.label_noise}")
        if self.classes is not None and (self.name != "generated" or self.classes < 2):
            raise DataError(
                f"classes is for generated images and must be >= 2, got {self.classes} "
                f"for {self.name}"
            )
        if self.image_size is not None and self.name != "generated" and not self.source.lazy:
            raise DataError(
                f"image_size is for generated images and lazy sources; {self.name} has its own"
            )

    @property
    def known_shape(self) -> tuple[int, int] | None:
        """Number of classes and image side, if known without loading."""
        if self.name == "generated":
            return self.classes or 10, self.image_size or 32
        return (10, 8) if self.name in ("digits", "noisy-digits") else None

    @property
    def source(self) -> Source:
        """The known source, or one with only a hub name."""
        return SOURCES.get(self.name) or Source(self.name)
