"""The paper's claims as data: what is trained or measured, and the paper's values.

Training recipes are those cited in the paper (App. E): He et al. (2016) for ResNets,
omihub777/ViT-CIFAR for ViT, Liu et al. (2022) for ConvNeXt. Not specified there: 164 epochs (He's
64,000 steps at a batch of 128) and 90 epochs for ResNet-50.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from lab.arms import Arm
from lab.settings import RunSettings


class Statement(NamedTuple):
    """A claim in words: what is measured, the paper's wording, and the bounds to judge it by."""

    label: str
    paper: str
    least: float = float("-inf")
    most: float = float("inf")


@dataclass(frozen=True)
class Cell:
    """One comparison of a table.

    Attributes:
        label: Its position in the table.
        settings: Settings at full scale.
        base: Test accuracy of the baseline in percent.
        ours: Test accuracy of the paper's method.
        time: Relative time of a step; None if the paper does not give it.
        radius: Radius of the paper's recipe in this cell.
        metric: `accuracy`, or `ema_accuracy` for averaged weights.
    """

    label: str
    settings: RunSettings
    base: float
    ours: float
    time: float | None = None
    radius: float = 0.2
    metric: str = "accuracy"

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """The paper's recipe and primum, at the same radius."""
        return Arm("paper", radius=self.radius), Arm("primum", radius=self.radius)


@dataclass(frozen=True)
class Table:
    """A table of the paper: its cells, and the number of seeds it averages over."""

    title: str
    seeds: int
    cells: tuple[Cell, ...]


# Figure 1, for each network. "an average error of around 0.5 or less" (paper, Sec. 4.3).
HEAD_ERROR = Statement("error of the last layer's matrix", "around 0.5 or less", most=0.55)
ERROR_FALLS = Statement("the error falls as earlier layers are added", "rapidly", least=1e-9)
POSITIVE = Statement("steps whose REOR is positive", "the majority", least=0.5 + 1e-9)
# Figure 2, for each network, optimizer and batch size; shares of the harm.
REMOVED = Statement("harm removed", "substantial", least=0.25)
MOST_ITERS, MANY_ITERS = 50, 2000  # of the paper's solver, and as good as its limit
CONVERGES = Statement(
    "converges in a small number of iterations", f"consistently; at most {MOST_ITERS}", least=0.95
)
# Figure 11: the most blocks against one.
SLOWER = Statement("time per batch", "substantially more", least=1.5)
LARGER = Statement("peak memory", "substantially more", least=1.5)
FLUCTUATES = Statement(
    "test accuracy changes with the number of blocks, by rounding alone", "fluctuates", least=1e-9
)

RESNET44 = RunSettings(model="resnet44", norm="group", schedule="step", epochs=164)
VIT = RunSettings(
    model="vit",
    optimizer="adamw",
    epochs=200,
    warmup=5,
    lr_floor=0.01,
    label_smoothing=0.1,
    augment="vit",
)
RESNET50 = RunSettings(
    model="resnet50",
    data="tiny-imagenet",
    batch_size=256,
    lr=0.1,
    schedule="step",
    epochs=90,
    augment="resized-flip",
)
CONVNEXT = RunSettings(
    model="convnext-t",
    batch_size=4096,
    optimizer="adamw",
    lr=4e-3,
    weight_decay=0.05,
    decay_norms=False,
    epochs=300,
    warmup=20,
    lr_floor=2.5e-4,
    label_smoothing=0.1,
    augment="convnext",
    ema=0.9999,
    precision="fp16",
    data="tiny-imagenet",
)
IMAGENET100 = replace(CONVNEXT, data="imagenet100", ema=None)

# By model and batch size: CIFAR-10 base, ours, time; CIFAR-100 base, ours, time.
_TABLE1 = {
    ("ResNet-44", 128): (91.71, 91.93, 1.13, 65.22, 65.50, 1.30),
    ("ResNet-44", 256): (91.22, 91.48, 1.07, 64.84, 65.41, 1.11),
    ("ResNet-44", 512): (90.60, 90.75, 1.03, 63.51, 64.37, 1.05),
    ("ResNet-44", 1024): (89.22, 89.00, 1.03, 61.43, 62.31, 1.03),
    ("ViT", 128): (89.94, 90.34, 1.08, 63.05, 63.63, 1.10),
    ("ViT", 256): (89.62, 89.96, 1.02, 62.27, 63.06, 1.08),
    ("ViT", 512): (89.59, 90.17, 1.01, 60.73, 62.11, 1.05),
    ("ViT", 1024): (88.91, 89.61, 1.01, 58.82, 61.06, 1.04),
}
# By data and batch size: base (radius 0), then by radius.
_RADII = (0.05, 0.1, 0.2, 0.4, 0.8)
_TABLE5 = {
    ("cifar10", 128): (91.71, 91.62, 91.66, 91.93, 91.84, 91.65),
    ("cifar10", 512): (90.60, 90.82, 90.85, 90.75, 90.67, 85.59),
    ("cifar100", 128): (65.22, 65.54, 65.73, 65.50, 66.11, 66.01),
    ("cifar100", 512): (63.51, 63.63, 63.79, 64.37, 64.88, 65.02),
}
_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def _table1() -> tuple[Cell, ...]:
    cells = []
    for (model, batch), values in _TABLE1.items():
        for data, (base, ours, time) in zip(_NAMES, (values[:3], values[3:]), strict=True):
            point = RESNET44 if model == "ResNet-44" else VIT
            # The one setting in which the paper uses a smaller radius (Sec. 5.2).
            small = (model, data, batch) == ("ResNet-44", "cifar10", 1024)
            cells.append(
                Cell(
                    f"{model}, {_NAMES[data]}, B={batch}",
                    replace(point, data=data, batch_size=batch),
                    base,
                    ours,
                    time,
                    radius=0.1 if small else 0.2,
                )
            )
    return tuple(cells)


def _table5() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            f"{_NAMES[data]}, B={batch}, c={radius:g}",
            replace(RESNET44, data=data, batch_size=batch),
            base,
            ours,
            radius=radius,
        )
        for (data, batch), (base, *others) in _TABLE5.items()
        for radius, ours in zip(_RADII, others, strict=True)
    )


TABLES: dict[str, Table] = {
    "table1": Table("Table 1: accuracy and time on CIFAR", 5, _table1()),
    "table2a": Table(
        "Table 2a: accuracy and time on Tiny-ImageNet",
        5,
        (
            Cell("ResNet-50, group norm", replace(RESNET50, norm="group"), 47.94, 48.69, 1.07),
            Cell("ResNet-50, batch norm", replace(RESNET50, norm="batch"), 56.37, 56.20, 1.02),
            Cell(
                "ConvNeXt-T, without Mixup",
                replace(CONVNEXT, augment="convnext-no-mix"),
                54.08,
                54.54,
                1.18,
                metric="ema_accuracy",
            ),
            Cell("ConvNeXt-T, with Mixup", CONVNEXT, 59.69, 59.78, 1.17, metric="ema_accuracy"),
        ),
    ),
    "table2b": Table(
        "Table 2b: accuracy and time on ImageNet-100",
        1,
        (
            Cell(
                "ConvNeXt-T, without Mixup, 100 epochs",
                replace(IMAGENET100, augment="convnext-no-mix", epochs=100, warmup=5),
                76.50,
                76.66,
                1.04,
            ),
            Cell(
                "ConvNeXt-T, with Mixup, 100 epochs",
                replace(IMAGENET100, epochs=100, warmup=5),
                78.60,
                79.76,
                1.04,
            ),
            Cell("ConvNeXt-T, standard", IMAGENET100, 83.60, 83.90, 1.05),
            Cell(
                "ConvNeXt-T, standard, more augmentation",
                replace(IMAGENET100, augment="convnext-more"),
                83.90,
                84.26,
                1.05,
            ),
        ),
    ),
    "ablation-radius": Table("Table 5: radius of the trust region", 3, _table5()),
}
