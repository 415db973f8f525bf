"""Everything a run depends on, as plain values, and the key made from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast

from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.images import DataSettings
from primum.experiments.models import MODELS
from primum.experiments.models.norms import Norm
from primum.experiments.schedules import scaled_lr
from primum.experiments.sweeps.arms import Arm

VERSION = 1  # raise it when the same settings no longer give the same numbers

# The paper's for CIFAR (App. E), at batches of 128; they grow with the batch's square root.
RATES: dict[str, float] = {"sgd": 0.1, "adamw": 1e-3}
DECAYS: dict[str, float] = {"sgd": 1e-4, "adamw": 5e-5}
OPTIMIZERS: dict[str, str] = {"sgd": "SGD", "adamw": "AdamW"}


class SettingsError(ValueError):
    """Settings that do not go together, with what to do about it."""


def _option(default: Any, kind: type, about: str, choices: tuple[str, ...] | None = None) -> Any:
    """A setting with what its command-line option says about it."""
    return field(default=default, metadata={"kind": kind, "help": about, "choices": choices})


@dataclass(frozen=True)
class RunSettings:
    """One run. The same settings give the same numbers, times apart.

    Where the data are is no part of it; what they are is.
    """

    model: str = _option(
        "cnn-small", str, "resnet20, vit-micro, ..., or your own as package.module:factory"
    )
    norm: Norm | None = _option(None, str, "of models with the choice", ("group", "batch"))  # noqa: RUF009
    data: str = _option("cifar10", str, "cifar100, digits, generated, ..., or owner/name")
    label_column: str | None = _option(None, str, "column of class numbers, if not the usual one")
    train_size: int | None = _option(None, int, "only so many training images")
    test_size: int | None = _option(None, int, "only so many test images")
    balanced: bool = _option(False, bool, "of these, as many from each class")
    label_noise: float = _option(0.0, float, "share of training labels replaced by wrong ones")
    noise_seed: int = _option(0, int, "which labels those are")
    image_size: int | None = _option(None, int, "side of generated images, or of crops")
    classes: int | None = _option(None, int, "of generated images")
    augment: str = _option("crop-flip", str, "augmentation", tuple(AUGMENTATIONS))
    batch_size: int = _option(128, int, "samples of a step")
    epochs: int = _option(12, int, "length of a run")
    steps: int | None = _option(None, int, "length in steps, instead of epochs")
    evaluate_every: int = _option(1, int, "epochs from one test to the next; the last is tested")
    optimizer: Literal["sgd", "adamw"] = _option("sgd", str, "optimizer", tuple(OPTIMIZERS))
    lr: float | None = _option(
        None, float, "0.1 (sgd) or 0.001 (adamw), times the root of batch size / 128"
    )
    lr_scale: float = _option(1.0, float, "multiplies the learning rate, given or not")
    weight_decay: float | None = _option(None, float, "1e-4 (sgd) or 5e-5 (adamw)")
    decay_norms: bool = _option(True, bool, "weight decay of biases and norms too")
    momentum: float = _option(0.9, float, "of sgd")
    nesterov: bool = _option(False, bool, "Nesterov's momentum")
    beta1: float = _option(0.9, float, "of adamw")
    beta2: float = _option(0.999, float, "of adamw")
    eps: float = _option(1e-8, float, "of adamw")
    schedule: Literal["cosine", "step", "constant"] = _option(
        "cosine",
        str,
        "of lr: half a cosine, a tenth at half and three quarters, or none",
        ("cosine", "step", "constant"),
    )
    warmup: float = _option(0.0, float, "epochs of linear warm-up")
    lr_floor: float = _option(0.0, float, "end of the cosine, as a share of lr")
    label_smoothing: float = _option(0.0, float, "share of the target spread over all classes")
    ema: float | None = _option(None, float, "decay of an average of the weights, also evaluated")
    precision: Literal["fp32", "bf16", "fp16"] = _option(
        "fp32", str, "autocast; fp16 with a GradScaler", ("fp32", "bf16", "fp16")
    )
    clip: float | None = _option(None, float, "largest norm of the gradient")
    device: str = _option("cpu", str, "cpu, cuda, ...")
    arm: Arm = field(default_factory=lambda: Arm("base"))
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"batch_size": 1, "epochs": 1, "steps": 1, "evaluate_every": 1, "seed": 0}
        for what, least in whole.items():
            value = getattr(self, what)
            if value is not None and value < least:
                raise SettingsError(f"{what} must be >= {least}, got {value}")
        for what in ("lr", "lr_scale", "clip", "eps"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{what} must be > 0 and finite, got {value}")
        for what in ("momentum", "label_smoothing", "lr_floor"):
            value = getattr(self, what)
            if not 0 <= value <= 1:
                raise SettingsError(f"{what} must be between 0 and 1, got {value}")
        for what in ("beta1", "beta2", "ema"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < 1:
                raise SettingsError(f"{what} must be >= 0 and below 1, got {value}")
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            raise SettingsError("nesterov needs a momentum above 0, got 0; leave one of them out")
        for what in ("warmup", "weight_decay"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < float("inf"):
                raise SettingsError(f"{what} must be >= 0 and finite, got {value}")
        for each in fields(self):
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value is not None and value not in choices:
                raise SettingsError(
                    f"{each.name} must be one of {', '.join(choices)}, got {value!r}"
                )
        self.data_settings()  # says what is wrong with them

    @property
    def rate(self) -> float:
        """The full learning rate."""
        own = scaled_lr(RATES[self.optimizer], self.batch_size) if self.lr is None else self.lr
        return own * self.lr_scale

    @property
    def decay(self) -> float:
        """The weight decay."""
        return DECAYS[self.optimizer] if self.weight_decay is None else self.weight_decay

    @property
    def title(self) -> str:
        """In a few words, the same for all arms."""
        name = OPTIMIZERS[self.optimizer]
        return f"{self.model} on {self.data}, {name}, batches of {self.batch_size}"

    def data_settings(
        self, data_dir: str | None = None, cache_dir: str | None = None
    ) -> DataSettings:
        """What to load, and from where."""
        same = ("label_column", "train_size", "test_size", "balanced", "label_noise", "noise_seed")
        return DataSettings(
            self.data,
            data_dir,
            cache_dir,
            **{name: getattr(self, name) for name in (*same, "image_size", "classes")},
        )

    def shared(self) -> dict[str, Any]:
        """Plain values without arm and seed; defaults that depend on others are filled in."""
        found = asdict(self)
        for name in ("arm", "seed", "lr_scale"):
            del found[name]
        if self.evaluate_every == 1:  # came later; keys of older runs stay
            del found["evaluate_every"]
        known = MODELS.get(self.model)
        norm = self.norm or (known.norms[0] if known and known.norms else None)
        epochs = None if self.steps else self.epochs
        return found | {"lr": self.rate, "weight_decay": self.decay, "norm": norm, "epochs": epochs}

    @property
    def key(self) -> str:
        """16 hex digits that no other settings have."""
        content = {
            "version": VERSION,
            **self.shared(),
            "arm": {"name": self.arm.name, **self.arm.settings()},
            "seed": self.seed,
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def varying(self) -> list[str]:
        """Names of the settings that have an option of their own."""
        return [each.name for each in fields(self) if "help" in each.metadata]


def about(name: str) -> dict[str, Any]:
    """Kind, help, choices and default of a setting's option."""
    found = next(each for each in fields(RunSettings) if each.name == name)
    return {**cast("dict[str, Any]", dict(found.metadata)), "default": found.default}
