"""The settings of the paper's tables made smaller, by one rule for all of them, said here."""

from __future__ import annotations

from dataclasses import replace

from primum.experiments.schedules import scaled_lr
from primum.experiments.sweeps.reproduce.findings import Scale
from primum.experiments.sweeps.settings import RunSettings

CONVOLUTIONAL = ("resnet44", "resnet50")
SEEDS: dict[Scale, int] = {"small": 3, "smoke": 1}
SHORT, LONG = 10, 20
SMALL_TABLES = (
    "CIFAR subsets (8,000 training and 4,000 test images; CIFAR-100 stands in for Tiny-ImageNet "
    "and ImageNet-100), the small CNN for ResNets and the small transformer for ViT and ConvNeXt, "
    "10 epochs (20 for the 300 of ImageNet-100), and batches of 512 for ConvNeXt's 4,096. "
    "Optimizers, norms, schedules, warm-up's share, smoothing, augmentations and radii stay."
)
SMOKE = "Two steps, or next to nothing: it shows that everything runs, and nothing else."


def scaled(settings: RunSettings, scale: Scale) -> RunSettings:
    """Settings at a scale."""
    if scale == "full":
        return settings
    convolutional = settings.model in CONVOLUTIONAL
    rest = replace(
        settings,
        model="cnn-small" if convolutional else "vit-micro",
        norm=settings.norm if convolutional else None,
        precision="fp32",
    )
    return _smoke(rest) if scale == "smoke" else _small(rest)


def _small(settings: RunSettings) -> RunSettings:
    batch = 512 if settings.batch_size > 1024 else settings.batch_size
    epochs = LONG if settings.data == "imagenet100" and settings.epochs > 200 else SHORT
    lr = settings.lr
    if lr is not None:  # given for another batch size
        lr = scaled_lr(lr, batch, base_batch_size=settings.batch_size)
    return replace(
        settings,
        data=settings.data if settings.data.startswith("cifar") else "cifar100",
        train_size=8000,
        test_size=4000,
        batch_size=batch,
        lr=lr,
        epochs=epochs,
        warmup=round(epochs * settings.warmup / settings.epochs, 2),
        # The average has to forget its beginning in so many steps.
        ema=None if settings.ema is None else 0.99,
    )


def _smoke(settings: RunSettings) -> RunSettings:
    size = max(4, min(32, settings.batch_size // 32))
    return replace(
        settings,
        data="generated",
        image_size=16,
        classes=20 if settings.data != "cifar10" else 10,
        train_size=2 * size,
        test_size=20,
        batch_size=size,
        steps=2,
        warmup=0.0,
        ema=None if settings.ema is None else 0.5,
    )
