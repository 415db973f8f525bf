"""What to inspect, and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from primum.experiments.augment import AUGMENTATIONS
from primum.experiments.images import DataSettings
from primum.experiments.models.norms import Norm
from primum.experiments.schedules import constant, scaled_lr, warmup_cosine

OptimizerName = Literal["sgd", "adamw"]
# The paper's for CIFAR (App. E), at batches of 128; they grow with the batch's square root.
RATES: dict[str, float] = {"sgd": 0.1, "adamw": 1e-3}
DECAYS: dict[str, float] = {"sgd": 1e-4, "adamw": 5e-5}


class InspectError(ValueError):
    """Something that cannot be inspected, with what to do about it."""


@dataclass(frozen=True)
class InspectSettings:
    """A model, its data and optimizer, and when to look.

    Args:
        model: A name of `MODELS`, or an import path.
        data: What to load.
        norm: For models that have the choice.
        optimizer: SGD with momentum 0.9, or AdamW.
        lr: Learning rate; None is 0.1 (SGD) or 0.001 (AdamW) at batches of 128 and grows with the
            square root of the batch.
        weight_decay: None is 1e-4 (SGD) or 5e-5 (AdamW).
        schedule: Of the learning rate.
        batch_size: Of training and of what is measured.
        augment: A name of `AUGMENTATIONS`.
        train_steps: How long to train; 0 looks at the model as it is.
        every: Steps from one look to the next; the first is before the first step.
        batches: How many batches to measure at each look.
        reduce: Train after `primum.attach` instead of `primum.observe`.
        radius: Of the trust region.
        lr_factors: For the real steps: by how much to multiply the learning rate.
        seed: Of first parameters and order.
        device: Where to train and to measure.
    """

    model: str = "cnn-small"
    data: DataSettings = field(default_factory=DataSettings)
    norm: Norm | None = None
    optimizer: OptimizerName = "sgd"
    lr: float | None = None
    weight_decay: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    batch_size: int = 128
    augment: str = "crop-flip"
    train_steps: int = 0
    every: int = 50
    batches: int = 1
    reduce: bool = False
    radius: float = 0.2
    lr_factors: tuple[float, ...] = (0.25, 1.0, 4.0)
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.optimizer not in RATES:
            raise InspectError(f'optimizer must be "sgd" or "adamw", got {self.optimizer!r}')
        if self.augment not in AUGMENTATIONS:
            raise InspectError(
                f"unknown augmentation {self.augment!r}; choose from {', '.join(AUGMENTATIONS)}"
            )
        least = {"batch_size": 1, "train_steps": 0, "every": 1, "batches": 1}
        for what, lowest in least.items():
            if getattr(self, what) < lowest:
                raise InspectError(f"{what} must be >= {lowest}, got {getattr(self, what)}")
        if self.lr is not None and not self.lr > 0:
            raise InspectError(f"lr must be > 0, got {self.lr}")

    @property
    def rate(self) -> float:
        """The full learning rate."""
        return self.lr or scaled_lr(RATES[self.optimizer], self.batch_size)

    @property
    def decay(self) -> float:
        """The weight decay."""
        return DECAYS[self.optimizer] if self.weight_decay is None else self.weight_decay

    @property
    def title(self) -> str:
        """In a few words."""
        name = {"sgd": "SGD", "adamw": "AdamW"}[self.optimizer]
        return f"{self.model} on {self.data.name}, {name}, batches of {self.batch_size}"

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """SGD or AdamW over all parameters."""
        if self.optimizer == "sgd":
            return SGD(model.parameters(), lr=self.rate, momentum=0.9, weight_decay=self.decay)
        return AdamW(model.parameters(), lr=self.rate, weight_decay=self.decay)

    def make_schedule(self, optimizer: Optimizer) -> LambdaLR:
        """Constant, or half a cosine down to 0."""
        if self.schedule == "cosine" and self.train_steps:
            return warmup_cosine(optimizer, steps=self.train_steps)
        return constant(optimizer)

    def as_dict(self) -> dict[str, Any]:
        """Plain values that arms and seeds share, without folders of this machine."""
        found = asdict(self)
        data = found.pop("data")
        kept = {k: v for k, v in data.items() if v is not None and not k.endswith("_dir")}
        del found["seed"], found["reduce"]
        if self.device == "cpu":  # came later; records of older runs stay comparable
            del found["device"]
        return found | {"data": kept, "lr": self.rate, "weight_decay": self.decay}
