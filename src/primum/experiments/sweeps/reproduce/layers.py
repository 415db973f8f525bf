"""Figure 1: how well the last layer stands for the network, and what its weights do there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from primum.experiments.images import DataSettings, load_data
from primum.experiments.inspection import InspectSettings
from primum.experiments.inspection.moment import Moment
from primum.experiments.inspection.session import Inspection
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.findings import Finding, Scale, judge
from primum.experiments.sweeps.reproduce.parts import Part, make_part

AROUND_HALF = 0.55  # "an average error of around 0.5 or less" (paper, Sec. 4.1)


@dataclass(frozen=True)
class Network:
    """One of the figure's columns."""

    label: str
    settings: InspectSettings


def networks(scale: Scale, place: Place, device: str = "cpu") -> list[Network]:
    """ResNet-20 on CIFAR-10 by SGD and ViT-small on CIFAR-100 by AdamW, after 100 epochs.

    small: the small CNN and transformer on 10,000 images, after 10 epochs. The last look counts.
    """
    if scale == "smoke":
        data = DataSettings("generated", train_size=32, test_size=16, image_size=16)
        smoke = InspectSettings(data=data, batch_size=8, train_steps=2, every=2, device=device)
        return [
            Network("cnn-small, SGD", smoke),
            Network("vit-micro, AdamW", replace(smoke, model="vit-micro", optimizer="adamw")),
        ]
    full = scale == "full"
    size = None if full else 10_000
    steps = 100 * 390 if full else 10 * 78
    chosen = {
        "CIFAR-10, SGD": ("resnet20" if full else "cnn-small", "cifar10", "sgd"),
        "CIFAR-100, AdamW": ("vit-small" if full else "vit-micro", "cifar100", "adamw"),
    }
    return [
        Network(
            f"{model}, {label}",
            InspectSettings(
                model,
                DataSettings(data, place.data_dir, place.cache_dir, train_size=size),
                optimizer=optimizer,  # type: ignore[arg-type]
                train_steps=steps,
                every=steps,
                batches=20 if full else 10,
                device=device,
            ),
        )
        for label, (model, data, optimizer) in chosen.items()
    ]


def run_layers(scale: Scale, place: Place, device: str = "cpu") -> list[Finding]:
    """Train, look at the end, judge. Finished networks are kept."""
    findings = []
    for network in networks(scale, place, device):
        found = make_part(part_of(network), place, partial(Column, network.settings))
        moments = [
            Moment(
                **moment | {"layers": tuple(moment["layers"]), "changes": {}, "real_changes": {}}
            )
            for moment in found["moments"]
        ]
        findings += judge_moments(network.label, moments, scale)
    return findings


def part_of(network: Network) -> Part:
    """What the network's file is called after."""
    settings = network.settings
    kept = settings.as_dict() | {"seed": settings.seed, "reduce": settings.reduce}
    return Part(f"figure1-{settings.model}", network.label, kept, settings.device)


class Column(Inspection):
    """A network's inspection as the work on a part; its result is the last look."""

    def __init__(self, settings: InspectSettings) -> None:
        super().__init__(settings, load_data(settings.data))

    @property
    def done(self) -> int:
        """Steps taken and batches measured."""
        return self.training.step_count + len(self.moments)

    @property
    def total(self) -> int:
        """Of these; there is a look at each end."""
        return self.settings.train_steps + 2 * self.settings.batches

    @property
    def finished(self) -> bool:
        """Whether the last look has ended."""
        return self.complete

    def result(self) -> dict[str, Any]:
        """The last look, but for the changes of each sample, which nobody asks for here."""
        last = [m.as_dict() for m in self.moments if m.step == self.settings.train_steps]
        for moment in last:
            del moment["changes"], moment["real_changes"]
        return {"moments": last}


def judge_moments(label: str, moments: list[Moment], scale: Scale) -> list[Finding]:
    """The figure's three statements about one network."""
    head = fmean(moment.error[-1] for moment in moments)
    middle = fmean(moment.error[len(moment.error) // 2] for moment in moments)
    reors = [m.table["reor"][m.table["weights"].index("paper")] for m in moments]
    known = [reor for reor in reors if math.isfinite(reor)]  # without harm there is no share of it
    positive = fmean(reor > 0 for reor in known) if known else math.nan
    mean = fmean(known) if known else math.nan
    return [
        Finding(
            f"{label}: error of the last layer's matrix",
            "around 0.5 or less",
            f"{head:.2f}",
            judge(head <= AROUND_HALF, scale),
            f"mean over {len(moments)} batches",
        ),
        Finding(
            f"{label}: the error falls as earlier layers come in",
            "rapidly",
            f"{head:.2f} (last), {middle:.2f} (half of them)",
            judge(middle < head, scale),
        ),
        Finding(
            f"{label}: steps whose REOR is positive",
            "the majority",
            f"{100 * positive:.0f}%, mean {mean:+.2f}",
            judge(positive > 0.5, scale),
            "weights of the paper's recipe",
        ),
    ]
