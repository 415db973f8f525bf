"""The paper's settings scaled down, by one rule for all tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lab.schedules import scaled_lr
from lab.settings import LookSettings, RunSettings

Scale = Literal["full", "small", "smoke"]
CONVOLUTIONAL = ("resnet44", "resnet50")
SEEDS: dict[str, int] = {"small": 3, "smoke": 1}
SHORT, LONG = 10, 20
SMALL_TABLES = (
    "CIFAR subsets (8,000 training and 4,000 test images; CIFAR-100 stands in for Tiny-ImageNet "
    "and ImageNet-100), the small CNN for ResNets and the small transformer for ViT and ConvNeXt, "
    "10 epochs (20 for the 300 of ImageNet-100), and batches of 512 for ConvNeXt's 4,096. "
    "Optimizers, norms, schedules, warm-up's share, smoothing, augmentations and radii stay."
)
SMOKE = "A few steps on generated images: it shows that everything runs, and nothing else."


def scaled(settings: RunSettings, scale: Scale) -> RunSettings:
    """Settings of an accuracy table at a scale."""
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
    if lr is not None:  # was given for another batch size
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
        # A shorter run needs a faster average.
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


def figure1_runs(scale: Scale) -> dict[str, RunSettings]:
    """Runs of Figure 1's networks, measured at the end of training, by label.

    full: ResNet-20 on CIFAR-10 by SGD and ViT-small on CIFAR-100 by AdamW, after 100 epochs.
    small: the small CNN and transformer on 10,000 images, after 10 epochs.
    """
    if scale == "smoke":
        smoke = RunSettings(
            data="generated",
            train_size=32,
            test_size=16,
            image_size=16,
            batch_size=8,
            schedule="constant",
            steps=2,
            observe_every=1,
            look=LookSettings(every=2, radius=0.2),
        )
        vit = replace(smoke, model="vit-micro", optimizer="adamw")
        return {"cnn-small, SGD": smoke, "vit-micro, AdamW": vit}
    full = scale == "full"
    steps = 100 * 390 if full else 10 * 78
    common = RunSettings(
        model="resnet20" if full else "cnn-small",
        train_size=None if full else 10_000,
        schedule="constant",
        steps=steps,
        observe_every=1,
        look=LookSettings(every=steps, batches=20 if full else 10, radius=0.2),
    )
    vit = replace(
        common,
        model="vit-small" if full else "vit-micro",
        data="cifar100",
        optimizer="adamw",
    )
    return {
        f"{common.model}, CIFAR-10, SGD": common,
        f"{vit.model}, CIFAR-100, AdamW": vit,
    }
