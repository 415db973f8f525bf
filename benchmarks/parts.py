"""Why weights on the backbone's gradient alone hurt: head and backbone work against each other.

Trains the small CNN with weights on both parts, on the head alone and on the backbone alone. After
every step it measures how the logits of some test images changed: by the head's step with the old
features, and by the backbone's step with the old head. If the mean changes over the images point in
opposite directions, the two parts undo each other's work.

    python benchmarks/parts.py --data-dir DIR      # CIFAR-10; two minutes on one core
    python benchmarks/parts.py --quick             # generated images, seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from _common import Report, make_parser, use_threads
from torch import Tensor

from primum.experiments.arms import Arm
from primum.experiments.callbacks import Interference
from primum.experiments.images import load_data
from primum.experiments.job import own_random_numbers
from primum.experiments.settings import RunSettings
from primum.experiments.trainer import Trainer

ARMS = {
    "base": "plain",
    "primum@radius=0.4": "both",
    "primum@radius=0.4,part=head": "head alone",
    "primum@radius=0.4,part=backbone": "backbone alone",
    "permuted@radius=0.4,part=backbone": "backbone alone, shuffled",
}
HEAD = ("weights on", "head's change", "backbone's change", "cosine", "harm", "train loss")
NOTE = (
    "Changes of the logits of 100 test images in one step, as norms over all of them, and the "
    "cosine between the mean changes by head and backbone; means over all steps but the first "
    "fifth. harm: of the head's step without weights, mean over the same steps."
)


def measure(settings: RunSettings, data: Any) -> dict[str, float]:
    """Train one run; return mean changes over all steps but the first fifth."""
    with own_random_numbers(settings.seed, torch.device("cpu")):
        trainer = Trainer(settings, data, [Interference()])
        rows, losses = [], []
        images = next(iter(trainer.test_batches(100))).inputs
        while not trainer.finished:
            before = _parts(trainer, images)
            trainer.step()
            if trainer.step_count > trainer.steps // 5:
                rows.append(_changes(before, _parts(trainer, images), trainer))
                losses.append(float(trainer.loss))
    means = [fmean(column) for column in zip(*rows, strict=True)]
    names = ("head", "backbone", "cosine", "harm")
    return dict(zip(names, means, strict=True)) | {"loss": fmean(losses)}


@torch.no_grad()
def _parts(trainer: Trainer, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the images [N, d], and the head's weight and bias."""
    model: Any = trainer.model
    model.eval()
    features = model.body(images).mean(dim=(2, 3))
    model.train()
    return features, model.head.weight.detach().clone(), model.head.bias.detach().clone()


def _changes(
    before: tuple[Tensor, Tensor, Tensor], after: tuple[Tensor, Tensor, Tensor], trainer: Trainer
) -> tuple[float, float, float, float]:
    by_head = before[0] @ (after[1] - before[1]).T + after[2] - before[2]
    by_backbone = (after[0] - before[0]) @ before[1].T
    cosine = torch.cosine_similarity(by_head.mean(0), by_backbone.mean(0), dim=0)
    last = trainer.method.last
    harm = float("nan") if last is None else float(last.harm_before)
    return float(by_head.norm()), float(by_backbone.norm()), float(cosine), harm


def image_parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of both benchmarks that train the small CNN."""
    parser = make_parser(script, description, quick="a few steps on generated images")
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="CIFAR-10 as Parquet (default: the hub)")
    add("--cache-dir", metavar="DIR", help="folder for decoded images")
    add("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    return parser


def load_images(arguments: argparse.Namespace, settings: RunSettings) -> tuple[RunSettings, Any]:
    """Settings and data; with --quick, a few steps on generated images."""
    if arguments.quick:
        settings = replace(
            settings, data="generated", image_size=8, train_size=64, test_size=100, batch_size=8,
            steps=10,
        )  # fmt: skip
    return settings, load_data(settings.data_settings(arguments.data_dir, arguments.cache_dir))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all arms, print and write a table."""
    parser = image_parser("parts.py", __doc__)
    parser.add_argument("--steps", type=int, default=160, metavar="N", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    settings = RunSettings(
        train_size=5000, test_size=1000, steps=arguments.steps, observe_every=1,
        seed=arguments.seed,
    )  # fmt: skip
    with use_threads(1):
        report = Report("parts.py", argv, arguments.out)
        settings, data = load_images(arguments, settings)
        found = {}
        for arm, name in ARMS.items():
            found[name] = measure(replace(settings, arm=Arm.parse(arm)), data)
            print(f"{name}: cosine {found[name]['cosine']:+.2f}", flush=True)
    rows = [
        [name, f"{each['head']:.2f}", f"{each['backbone']:.2f}", f"{each['cosine']:+.2f}",
         f"{each['harm']:.3f}", f"{each['loss']:.2f}"]
        for name, each in found.items()
    ]  # fmt: skip
    report.save({"parts": found}, (HEAD, rows), NOTE)
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
