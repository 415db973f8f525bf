"""The settings that determine a run, as plain values, and their hash, the run's key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from lab.arms import Arm, Task
from lab.augment import AUGMENTATIONS
from lab.defaults import LANGUAGE_RATES, LATER, OPTIMIZERS, usual_decay, usual_lr
from lab.errors import UserError, check_least
from lab.images import DataSettings
from lab.models import MODELS
from lab.models.norms import Norm
from lab.schedules import ScheduleName
from lab.texts import TextSettings, Tokens, digest_of
from primum.kernel.recipe import RADIUS

Precision = Literal["fp32", "bf16", "fp16"]
VERSION = 1  # increase it if the same settings no longer give the same numbers


@dataclass(frozen=True)
class LookSettings:
    """When and how to measure the whole network during training.

    Attributes:
        every: Steps between measurements; the first one is before the first step.
        batches: Batches per measurement.
        radius: Radius of the trust region.
        lr_factors: Factors on the learning rate for the real steps on copies.
    """

    every: int = 50
    batches: int = 1
    radius: float = RADIUS["sample"]
    lr_factors: tuple[float, ...] = (0.25, 1.0, 4.0)

    def __post_init__(self) -> None:
        check_least(self, {"every": 1, "batches": 1})
        if not 0 <= self.radius < float("inf"):
            raise UserError(f"radius must be >= 0 and finite, got {self.radius}")


def _option(
    default: Any,
    kind: type,
    about: str,
    choices: tuple[Any, ...] | None = None,
    task: Task | None = None,
) -> Any:
    """A setting with its command-line help and, if it is for one task only, that task."""
    about = about if task is None else f"{task}: {about}"
    meta = {"kind": kind, "help": about, "choices": choices, "task": task}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. The same settings give the same numbers, except times.

    The location of the data is not included.
    """

    task: Task = _option("images", str, "kind of data", get_args(Task))  # noqa: RUF009
    model: str = _option(
        "cnn-small",
        str,
        "resnet20, vit-micro, ...; language: gpt-micro, ...; your own: package.module:factory",
    )
    norm: Norm | None = _option(  # noqa: RUF009
        None, str, "norm layers, for models that have both", ("group", "batch"), "images"
    )
    data: str = _option("cifar10", str, "cifar100, digits, ..., or owner/name; language: kjv")
    label_column: str | None = _option(
        None, str, "column of class indices, if not the usual one", task="images"
    )
    train_size: int | None = _option(None, int, "use only N training images or tokens")
    test_size: int | None = _option(None, int, "use only N test images or held-out tokens")
    balanced: bool = _option(False, bool, "choose these evenly from all classes", task="images")
    label_noise: float = _option(0.0, float, "share of wrong training labels", task="images")
    noise_seed: int = _option(0, int, "seed of the wrong labels", task="images")
    image_size: int | None = _option(
        None, int, "side of generated images or of crops", task="images"
    )
    classes: int | None = _option(None, int, "number of classes of generated images", task="images")
    augment: str = _option("crop-flip", str, "augmentation", tuple(AUGMENTATIONS), "images")
    tokens: Tokens = _option(  # noqa: RUF009
        "char", str, "characters, or words and punctuation", get_args(Tokens), "language"
    )
    vocabulary: int = _option(
        2000, int, "number of words to keep; all others are one token", task="language"
    )
    length: int = _option(64, int, "tokens per sequence", task="language")
    batch_size: int = _option(128, int, "images or sequences per step")
    epochs: int = _option(12, int, "length of a run in epochs")
    steps: int | None = _option(None, int, "length in steps, instead of epochs")
    evaluate_every: int = _option(1, int, "epochs between evaluations; always after the last")
    evaluate_steps: int | None = _option(None, int, "steps between evaluations, instead of epochs")
    optimizer: Literal["sgd", "adamw"] = _option("sgd", str, "optimizer", tuple(OPTIMIZERS))
    lr: float | None = _option(
        None,
        float,
        "0.1 (sgd) or 0.001 (adamw), times sqrt(batch size / 128); language: "
        f"{LANGUAGE_RATES['sgd']:g} or {LANGUAGE_RATES['adamw']:g}, times sqrt(batch size / 32)",
    )
    lr_scale: float = _option(1.0, float, "factor on the learning rate or its default")
    weight_decay: float | None = _option(
        None, float, "1e-4 (sgd) or 5e-5 (adamw); language: 0 or 0.01"
    )
    decay_norms: bool = _option(True, bool, "weight decay also for biases and norms")
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
        "of lr: cosine, linear, divided by ten at one half and three quarters, or constant",
        get_args(ScheduleName),
    )
    warmup: float = _option(0.0, float, "epochs of linear warm-up")
    warmup_steps: int | None = _option(None, int, "steps of linear warm-up, instead of epochs")
    lr_floor: float = _option(0.0, float, "final value of cosine and linear, as a share of lr")
    label_smoothing: float = _option(0.0, float, "share of the target spread over all classes")
    ema: float | None = _option(None, float, "also evaluate an EMA of the weights with this decay")
    views: int = _option(
        1,
        int,
        "views of each test image in the final evaluation; 2: mirrored, 6: also shifted by a pixel",
        (1, 2, 6),
        "images",
    )
    precision: Precision = _option(  # noqa: RUF009
        "fp32", str, "autocast; fp16 with a GradScaler", get_args(Precision)
    )
    clip: float | None = _option(None, float, "maximum gradient norm")
    device: str = _option("cpu", str, "cpu, cuda, ...")
    # Not on the command line of `compare`:
    observe_every: int = 10
    shift_every: int | None = None
    order: Literal["epoch", "stream"] = "epoch"
    look: LookSettings | None = None
    arm: Arm = field(default_factory=lambda: Arm("base"))
    seed: int = 0

    def __post_init__(self) -> None:
        ones = "batch_size epochs steps evaluate_every evaluate_steps observe_every shift_every"
        least = dict.fromkeys([*ones.split(), "length"], 1) | {"seed": 0, "warmup_steps": 0}
        check_least(self, least)
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
            raise UserError("nesterov needs momentum > 0, got 0")
        for what in ("warmup", "weight_decay"):
            value = getattr(self, what)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"{what} must be >= 0 and finite, got {value}")
        for each in fields(self):
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value is not None and value not in choices:
                known = ", ".join(map(str, choices))
                raise UserError(f"{each.name} must be one of {known}, got {value!r}")
        if self.look is not None and self.order == "stream":
            raise UserError("whole-network measurements need batches in the order 'epoch'")
        self._check_task()
        self.text_settings() if self.task == "language" else self.data_settings()  # raise as well

    def _check_task(self) -> None:
        for each in fields(self):
            task = each.metadata.get("task") or self.task
            if task != self.task and getattr(self, each.name) != each.default:
                raise UserError(f"{each.name} is for {task}; leave it out for {self.task}")
        if self.task == "language" and (self.look is not None or self.order != "epoch"):
            raise UserError("whole-network measurements and the demo's order are only for images")
        if self.arm.task != self.task:
            if self.arm.name != "base":
                raise UserError(f"arm {self.arm.name} is for {self.arm.task}; set its task")
            object.__setattr__(self, "arm", Arm("base", task=self.task))

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        own = usual_lr(self.task, self.optimizer, self.batch_size) if self.lr is None else self.lr
        return own * self.lr_scale

    @property
    def decay(self) -> float:
        """The weight decay."""
        usual = usual_decay(self.task, self.optimizer)
        return usual if self.weight_decay is None else self.weight_decay

    @property
    def title(self) -> str:
        """Model, data, optimizer and batch size, the same for all arms."""
        name, size = OPTIMIZERS[self.optimizer], str(self.batch_size)
        data = self.data
        if self.task == "language":
            data = f"{self.tokens}s of {data.partition(':')[0]}"
            size = f"{size} x {self.length}"
        return f"{self.model} on {data}, {name}, batches of {size}"

    def text_settings(self, data_dir: str | None = None, file: str | None = None) -> TextSettings:
        """What text to load, and from where."""
        same = ("tokens", "vocabulary", "train_size", "test_size")
        return TextSettings(
            self.data, data_dir, file, **{name: getattr(self, name) for name in same}
        )

    def data_settings(
        self, data_dir: str | None = None, cache_dir: str | None = None
    ) -> DataSettings:
        """What images to load, and from where."""
        same = ("label_column", "train_size", "test_size", "balanced", "label_noise", "noise_seed")
        return DataSettings(
            self.data,
            data_dir,
            cache_dir,
            **{name: getattr(self, name) for name in (*same, "image_size", "classes")},
        )

    def shared(self) -> dict[str, Any]:
        """Plain values without arm and seed, with dependent defaults filled in.

        Settings added after the first stored runs are left out at their defaults to keep old keys.
        """
        found = asdict(self)
        for name in ("arm", "seed", "lr_scale"):
            del found[name]
        for each in fields(self):
            if each.metadata.get("task") not in (None, self.task):
                del found[each.name]
        for name, default in LATER.items():
            if found.get(name, default) == default:
                found.pop(name, None)
        if self.look is not None:
            found["look"]["lr_factors"] = list(self.look.lr_factors)
        epochs = None if self.steps else self.epochs
        found |= {"lr": self.rate, "weight_decay": self.decay, "epochs": epochs}
        if self.task == "language":
            return found | {"text": digest_of(self.data)}
        known = MODELS.get(self.model)
        return found | {"norm": self.norm or (known.norms[0] if known and known.norms else None)}

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
    """What a matched control takes from finished runs.

    Attributes:
        lr_factors: Factors on the learning rate: one for the run, or one per epoch.
        steps_factor: Factor on the number of steps.
    """

    lr_factors: tuple[float, ...] = (1.0,)
    steps_factor: float = 1.0

    def lr_factor(self, epoch: int) -> float:
        """The factor of an epoch; the last one also applies to all later epochs."""
        return self.lr_factors[min(epoch, len(self.lr_factors) - 1)]


def run_options() -> list[Any]:
    """The dataclass fields that are command-line options, with their help in the metadata."""
    return [each for each in fields(RunSettings) if each.metadata]
