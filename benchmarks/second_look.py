"""Does harm in the head predict harm in the whole network, and does a second look help?

Trains the small CNN with and without weights. Every few steps, from the same state and for the same
batch, it takes the step with several kinds of weights on copies, and measures how the loss of every
sample changes: by the head's step, by the backbone's, and by the shift of the logits that is common
to all images. Weights of a second look are those of `second_look=head` and `network`.

    python benchmarks/second_look.py --data-dir DIR      # CIFAR-10; five minutes on one core
    python benchmarks/second_look.py --quick             # generated images, seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from statistics import fmean
from typing import Any

import torch
from _common import Report, make_parser, positive, use_threads
from _second_look import RADIUS, Row, moment

from primum.experiments.arms import Arm
from primum.experiments.images import load_data
from primum.experiments.job import own_random_numbers
from primum.experiments.settings import RunSettings
from primum.experiments.trainer import Trainer

RUNS = {"base": "plain", f"primum@radius={RADIUS}": "primum"}
HEAD = ("run", "step", "head's harm", "real harm", "less than plain, %", "harmed, %",
        "loss, batch", "common shift")  # fmt: skip
NOTE = (
    "Means over the measured steps of each run. Harm: the mean over the batch of each sample's "
    "loss increase, decreases counted as 0, in thousandths of a nat; in the head to first order, "
    "and really, of the whole network. less than plain: steps with less real harm than the plain "
    "step from the same state. harmed: share of the batch whose loss really rises. loss, batch: "
    "real change of the mean loss in a step, in thousandths. common shift: norm of the mean change "
    "of the logits over 500 test images."
)
PARTS = ("run", "step", "by the head", "by the backbone", "interaction", "head's share, %",
         "common shift's harm", "1st-order harm", "loss, test", "same sign, %",
         "cosine")  # fmt: skip
PARTS_NOTE = (
    "By the head, by the backbone, interaction: standard deviation over the batch of the change of "
    "a sample's loss, in thousandths. head's share: of the variance of the whole change. common "
    "shift's harm: real harm, if the logits of all samples of the batch moved by their mean "
    "change. 1st-order harm: of the whole network. loss, test: real change of the mean loss of 500 "
    "test images in a step, in thousandths. same sign: samples for which the drift in the head and "
    "in the whole network have the same sign. cosine: of the extra weights with primum's."
)


def train(settings: RunSettings, data: Any, every: int) -> dict[str, Any]:
    """Train one run and measure every few steps; return means and the number of measurements."""
    found = []
    with own_random_numbers(settings.seed, torch.device("cpu")):
        trainer = Trainer(settings, data)
        unseen = next(iter(trainer.test_batches(min(500, settings.test_size or 500))))
        while not trainer.finished:
            if trainer.step_count % every == every // 2:
                found.append(moment(trainer, unseen))
            trainer.step()
    return averaged(found) | {"measurements": len(found)}


def averaged(rows: Sequence[Any]) -> Any:
    """The mean of nested dicts of the same shape, number by number."""
    first = rows[0]
    if isinstance(first, dict):
        return {name: averaged([row[name] for row in rows]) for name in first}
    return fmean(rows)


def at(row: Row, path: str) -> float:
    """The value at a path such as `batch.total.harm`."""
    return float(reduce(lambda part, name: part[name], path.split("."), row))


def tables(runs: dict[str, dict[str, Any]]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of both tables."""
    steps, parts = [], []
    for run, found in runs.items():
        kinds: dict[str, Row] = {name: found[name] for name in found if name != "measurements"}
        for kind, row in kinds.items():
            figure = partial(at, row)
            plain = kind == "plain"
            spreads = (f"batch.{part}.spread" for part in ("head", "backbone", "interaction"))
            steps.append([
                run, kind, f"{1000 * figure('head_first.harm'):.1f}",
                f"{1000 * figure('batch.total.harm'):.1f}",
                "–" if plain else f"{100 * figure('less_harm'):.0f}",
                f"{100 * figure('batch.total.harmed'):.0f}",
                f"{1000 * figure('batch.total.mean'):.1f}", f"{figure('test.common_shift'):.2f}",
            ])  # fmt: skip
            parts.append([
                run, kind, *(f"{1000 * figure(path):.0f}" for path in spreads),
                f"{100 * figure('batch.head_share'):.0f}",
                f"{1000 * figure('batch.common.harm'):.1f}",
                f"{1000 * figure('network_first.harm'):.1f}",
                f"{1000 * figure('test.total.mean'):.1f}",
                f"{100 * figure('agreement.same_sign'):.0f}" if plain else "–",
                "–" if plain else f"{figure('cosine'):.2f}",
            ])  # fmt: skip
    return steps, parts


def image_parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of benchmarks that train the small CNN."""
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
    """Measure both runs, print and write the tables."""
    parser = image_parser("second_look.py", __doc__)
    parser.add_argument("--every", type=positive, default=18, metavar="N", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    settings = RunSettings(train_size=5000, test_size=5000, seed=arguments.seed)
    every = 5 if arguments.quick else arguments.every
    with use_threads(1):
        report = Report("second_look.py", argv, arguments.out)
        settings, data = load_images(arguments, settings)
        runs = {}
        for arm, name in RUNS.items():
            runs[name] = train(replace(settings, arm=Arm.parse(arm)), data, every)
            print(f"{name}: {runs[name]['measurements']} measurements", flush=True)
    steps, parts = tables(runs)
    report.save({"runs": runs}, (HEAD, steps), NOTE, (PARTS, parts), PARTS_NOTE)
    report.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
