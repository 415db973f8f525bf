"""What a run depends on, as plain values, and the key made from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from primum.experiments.arms import Arm
from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.errors import UserError
from primum.experiments.images import DataSettings
from primum.experiments.models import MODELS
from primum.experiments.models.norms import Norm
from primum.experiments.schedules import ScheduleName, scaled_lr

VERSION = 1  # raise it when the same settings no longer give the same numbers

# The paper's for CIFAR (App. E), at batches of 128; they grow with the batch's square root.
RATES: dict[str, float] = {"sgd": 0.1, "adamw": 1e-3}
DECAYS: dict[str, float] = {"sgd": 1e-4, "adamw": 5e-5}
VIEWS = (1, 2, 6)
OPTIMIZERS: dict[str, str] = {"sgd": "SGD", "adamw": "AdamW"}


@dataclass(frozen=True)
class LookSettings:
    """When and how to measure the whole network during training.

    Attributes:
        every: Steps from one measurement to the next; the first is before the first step.
        batches: Batches measured each time.
        radius: Of the trust region.
        lr_factors: Factors on the learning rate for the steps that are really taken, on copies.
    """

    every: int = 50
    batches: int = 1
    radius: float = 0.2
    lr_factors: tuple[float, ...] = (0.25, 1.0, 4.0)

    def __post_init__(self) -> None:
        for what in ("every", "batches"):
            if getattr(self, what) < 1:
                raise UserError(f"{what} must be >= 1, got {getattr(self, what)}")
        if not 0 <= self.radius < float("inf"):
            raise UserError(f"radius must be >= 0 and finite, got {self.radius}")


def _option(default: Any, kind: type, about: str, choices: tuple[str, ...] | None = None) -> Any:
    """A setting with the help text of its command-line option."""
    return field(default=default, metadata={"kind": kind, "help": about, "choices": choices})


@dataclass(frozen=True)
class RunSettings:
    """One run. The same settings give the same numbers, except times.

    The location of the data is not part of it.
    """

    model: str = _option(
        "cnn-small", str, "resnet20, vit-micro, ..., or your own as package.module:factory"
    )
    norm: Norm | None = _option(None, str, "for models that have both", ("group", "batch"))  # noqa: RUF009
    data: str = _option("cifar10", str, "cifar100, digits, generated, ..., or owner/name")
    label_column: str | None = _option(None, str, "column of class numbers, if not the usual one")
    train_size: int | None = _option(None, int, "use only N training images")
    test_size: int | None = _option(None, int, "use only N test images")
    balanced: bool = _option(False, bool, "choose those evenly from all classes")
    label_noise: float = _option(0.0, float, "share of training labels replaced by wrong ones")
    noise_seed: int = _option(0, int, "which labels are replaced")
    image_size: int | None = _option(None, int, "side of generated images, or of crops")
    classes: int | None = _option(None, int, "number of classes of generated images")
    augment: str = _option("crop-flip", str, "augmentation", tuple(AUGMENTATIONS))
    batch_size: int = _option(128, int, "samples per step")
    epochs: int = _option(12, int, "length of a run")
    steps: int | None = _option(None, int, "length in steps, instead of epochs")
    evaluate_every: int = _option(1, int, "epochs between evaluations; the last epoch is evaluated")
    optimizer: Literal["sgd", "adamw"] = _option("sgd", str, "optimizer", tuple(OPTIMIZERS))
    lr: float | None = _option(
        None, float, "0.1 (sgd) or 0.001 (adamw), times sqrt(batch size / 128)"
    )
    lr_scale: float = _option(1.0, float, "factor on the learning rate, given or not")
    weight_decay: float | None = _option(None, float, "1e-4 (sgd) or 5e-5 (adamw)")
    decay_norms: bool = _option(True, bool, "weight decay of biases and norms too")
    bias_lr: float = _option(
        1.0, float, "factor on lr of biases and norms; their decay per step stays the same"
    )
    momentum: float = _option(0.9, float, "momentum of sgd")
    nesterov: bool = _option(False, bool, "Nesterov momentum")
    beta1: float = _option(0.9, float, "beta1 of adamw")
    beta2: float = _option(0.999, float, "beta2 of adamw")
    eps: float = _option(1e-8, float, "eps of adamw")
    schedule: ScheduleName = _option(  # noqa: RUF009
        "cosine",
        str,
        "of lr: half a cosine, a line, a tenth at one half and three quarters, or none",
        ("cosine", "linear", "step", "constant"),
    )
    warmup: float = _option(0.0, float, "epochs of linear warm-up")
    lr_floor: float = _option(0.0, float, "end of cosine and line, as a share of lr")
    label_smoothing: float = _option(0.0, float, "share of the target spread over all classes")
    ema: float | None = _option(None, float, "decay of averaged weights, which are evaluated too")
    views: int = _option(1, int, "views of each test image at the end: 1, 2 (mirrored too), or 6")
    precision: Literal["fp32", "bf16", "fp16"] = _option(
        "fp32", str, "autocast; fp16 with a GradScaler", ("fp32", "bf16", "fp16")
    )
    clip: float | None = _option(None, float, "largest norm of the gradient")
    device: str = _option("cpu", str, "cpu, cuda, ...")
    # Not on the command line of `primum compare`:
    observe_every: int = 10
    order: Literal["epoch", "stream"] = "epoch"
    look: LookSettings | None = None
    arm: Arm = field(default_factory=lambda: Arm("base"))
    seed: int = 0

    def __post_init__(self) -> None:
        at_least = {"batch_size": 1, "epochs": 1, "steps": 1, "evaluate_every": 1, "seed": 0}
        for what, least in (at_least | {"observe_every": 1}).items():
            value = getattr(self, what)
            if value is not None and value < least:
                raise UserError(f"{what} must be >= {least}, got {value}")
        for what in ("lr", "lr_scale", "bias_lr", "clip", "eps"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{what} must be > 0 and finite, got {value}")
        for what in ("momentum", "label_smoothing", "lr_floor"):
            value = getattr(self, what)
            if not 0 <= value <= 1:
                raise UserError(f"{what} must be between 0 and 1, got {value}")
        for what in ("beta1", "beta2", "ema"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"{what} must be >= 0 and below 1, got {value}")
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum above 0, got 0; leave one of them out")
        for what in ("warmup", "weight_decay"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"{what} must be >= 0 and finite, got {value}")
        for each in fields(self):
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value is not None and value not in choices:
                raise UserError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
        if self.views not in VIEWS:
            raise UserError(f"views must be one of {', '.join(map(str, VIEWS))}, got {self.views}")
        if self.look is not None and self.order == "stream":
            raise UserError("whole-network measurements need batches in the order 'epoch'")
        self.data_settings()  # raises for wrong ones

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
        """Model, data, optimizer and batch size, the same for all arms."""
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
        """Plain values without arm and seed, with defaults that depend on others filled in.

        Settings added after the first stored runs are left out at their defaults: keys stay.
        """
        found = asdict(self)
        for name in ("arm", "seed", "lr_scale"):
            del found[name]
        later = {"evaluate_every": 1, "observe_every": 10, "order": "epoch", "look": None,
                 "bias_lr": 1.0, "views": 1}  # fmt: skip
        for name, default in later.items():
            if found[name] == default:
                del found[name]
        if self.look is not None:
            found["look"]["lr_factors"] = list(self.look.lr_factors)
        known = MODELS.get(self.model)
        norm = self.norm or (known.norms[0] if known and known.norms else None)
        epochs = None if self.steps else self.epochs
        return found | {"lr": self.rate, "weight_decay": self.decay, "norm": norm, "epochs": epochs}

    @property
    def key(self) -> str:
        """16 hex digits, a hash of all settings."""
        content = {
            "version": VERSION,
            **self.shared(),
            "arm": {"name": self.arm.name, **self.arm.settings()},
            "seed": self.seed,
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Matched:
    """What a matched control takes over from finished runs.

    Attributes:
        lr_factors: Factors on the learning rate: one for the run, or one per epoch.
        steps_factor: Factor on the number of steps.
    """

    lr_factors: tuple[float, ...] = (1.0,)
    steps_factor: float = 1.0

    def lr_factor(self, epoch: int) -> float:
        """The factor of an epoch; the last one is used for all later epochs."""
        return self.lr_factors[min(epoch, len(self.lr_factors) - 1)]


def run_options() -> list[Any]:
    """The dataclass fields that are command-line options, with their help in the metadata."""
    return [each for each in fields(RunSettings) if each.metadata]
