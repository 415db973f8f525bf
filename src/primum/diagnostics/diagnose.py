"""`primum.diagnose`: forty plain steps on copies, and what they say about primum for this model."""

from __future__ import annotations

import copy
import math
import random
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import primum
from primum.diagnostics.self_check import SelfCheck, self_check
from primum.diagnostics.shift import common_shift
from primum.kernel.recipe import Primum
from primum.setup.validate import optimizers_in

STEPS = 20  # Plain ones first, then as many that are measured.
LOW, HIGH = 1 / 2, 2 / 3
LossFn = Callable[[nn.Module, Any], Tensor]

# Our settings, from lab/bench/results/early_shift.md: common shift in % over the 20 steps after the
# first epoch, and what radius 0.4 gains in points of test accuracy, with its 95% half-width.
SETTINGS = {
    "small CNN, group norm": (
        *((79, 4.1, 0.8), (77, 2.1, 2.6), (75, 3.5, 1.5), (75, 4.0, 1.9), (73, 5.5, 1.0)),
        *((72, 2.6, 0.9), (70, 0.2, 0.6), (65, 3.6, 0.8), (58, 2.0, 0.7)),
    ),
    "small CNN, batch norm": ((34, 0.4, 0.7), (13, 1.0, 0.8), (6, 0.1, 0.9)),
    "ResNet-20, group norm": ((94, 7.4, 2.8), (89, 11.1, 1.6), (72, 10.2, 2.8)),
    "ResNet-20, batch norm": ((32, 2.3, 1.0), (26, 1.3, 1.0)),
    "transformer": ((54, 1.8, 0.7), (45, 0.6, 0.7), (44, 1.3, 1.3)),
    "speedrun, batch norm": ((11, 0.0, 0.5), (9, 0.2, 0.7), (6, -0.2, 0.4)),
}


class Spread(NamedTuple):
    """A share over the measured steps; NaN if no step had one."""

    mean: float
    std: float
    lowest: float
    highest: float
    steps: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        seen = [value for value in values if math.isfinite(value)]
        if not seen:
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        return cls(fmean(seen), pstdev(seen), min(seen), max(seen), len(seen))

    def __str__(self) -> str:
        return f"{self.mean:.0%} ({self.lowest:.0%} to {self.highest:.0%})"


@dataclass(frozen=True)
class Diagnosis:
    """What 20 plain steps did to their own batches. `print` it; `plot` compares with our settings.

    Attributes:
        common_shift: Share of a step that moves the logits of all samples alike.
        harmed: Share of the samples with a loss whose loss a step raised, measured after the step.
        removed: Share of the harm that reweighting would remove, to first order at the head.
        time_added: Time of a step with primum over that of a plain one, minus 1; host clock.
        check: The self-test of gradients and prediction, as in `reducer.check`.
        per: What would get a weight: "sample" or "token".
    """

    common_shift: Spread
    harmed: Spread
    removed: Spread
    time_added: float
    check: SelfCheck
    per: str

    @property
    def verdict(self) -> str:
        """Whether primum is likely to help, in words, and how sure that is."""
        share = self.common_shift
        if not self.check.ok:
            return "Set up first: the self-test failed. Use the explicit form, reducer(losses)."
        if not share.steps:
            return "Cannot say: no step moved the logits. Is the learning rate 0?"
        if self.per == "token":
            return "Cannot say: for language models this share does not tell who gains."
        points = [point for kind in SETTINGS.values() for point in kind]
        gains = [gain for at, gain, _ in points if _zone(at / 100) == _zone(share.mean)]
        error = 2 * share.std / math.sqrt(share.steps)
        near = [f"{each:.0%}" for each in (LOW, HIGH) if abs(share.mean - each) <= error]
        close = f" (close to {' and '.join(near)}: other steps may say otherwise)" if near else ""
        return (
            f"{_zone(share.mean)} of a step{close}. There, {len(gains)} of our {len(points)} image "
            f"settings gained {min(gains):+.1f} to {max(gains):+.1f} points of accuracy, median "
            f"{median(gains):+.1f}. Not held out: the thresholds were read off these settings."
        )

    def __str__(self) -> str:
        lines = (
            f"moves all logits alike: {self.common_shift} of a step",
            f"a step harms: {self.harmed} of its {self.per}s",
            f"reweighting removes: {self.removed} of the harm, predicted at the last layer",
            f"time added: {self.time_added:.0%} of a step (host clock)",
            f"self-test of head {self.check.head!r}: {'ok' if self.check.ok else 'WRONG'}",
        )
        return "\n".join([line[:80] for line in lines] + textwrap.wrap(self.verdict, 80))

    def plot(self, path: str | None = None) -> Any:
        """Draw where this model stands among our settings, as a matplotlib figure; save it."""
        from primum.diagnostics.figures.style import canvas, looks, styled

        @styled
        def draw() -> Any:
            share, (figure, axes) = self.common_shift, canvas(6.4, 3.8)
            for kind, look in looks(list(SETTINGS)).items():
                shares, gains, widths = zip(*SETTINGS[kind], strict=True)
                axes.errorbar(*(shares, gains, widths), fmt=look.marker, c=look.colour, label=kind)
            axes.axvspan(100 * share.lowest, 100 * share.highest, color="#888888", alpha=0.2, lw=0)
            axes.axvline(100 * share.mean, color="#010203", label="this model, 20 steps")
            axes.axhline(0, color="#010203", linewidth=0.8)
            axes.set(xlim=(0, 100), xlabel="share of a step that moves all logits alike, %")
            axes.set(ylabel="points of test accuracy above plain")
            axes.legend(loc="upper left")
            if path is not None:
                figure.savefig(path)
            return figure

        return draw()


def _zone(share: float) -> str:
    if share > HIGH:
        return "Likely to help: above two thirds"
    if share >= LOW:
        return "May help a little: between half and two thirds"
    return "Expect little or nothing: below half"


def diagnose(model: nn.Module, optimizer: Any, batches: Any, loss_fn: LossFn) -> Diagnosis:
    """See `primum.diagnose`."""
    with _untouched(model, batches), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "primum: computing sample weights takes")
        model, optimizers = copy.deepcopy((model, list(optimizers_in(optimizer))))
        if not model.training:  # between epochs; single layers in eval mode stay as they are
            model.train()
        drawn = cycle(batches)
        plain = [_step(model, optimizers, batch, loss_fn)[1] for batch in islice(drawn, STEPS)]
        if not plain:
            raise ValueError("batches is empty; pass a DataLoader or a list of batches")
        reducer, outputs = primum.observe(model, optimizers), list[Tensor]()
        seconds: list[float] = []
        assert reducer.head is not None
        reducer.head.register_forward_hook(lambda *call: outputs.append(call[2].detach().clone()))
        shares, harmed, removed = [], [], []
        for number, batch in enumerate(islice(drawn, STEPS)):
            outputs.clear()
            torch.manual_seed(number)
            losses, took = _step(model, optimizers, batch, loss_fn)
            torch.manual_seed(number)  # the same dropout masks
            with torch.no_grad():
                change = loss_fn(model, batch) - losses
            logits = torch.cat([each.flatten(0, -2) for each in outputs])
            report = reducer.last
            if report is None:
                raise ValueError("no gradient reached the head: does loss_fn call the model?")
            harm, counted = float(report.harm_before), int(((losses != 0) | (change != 0)).sum())
            per, seconds = report.per, [*seconds, took]
            shares.append(float(common_shift(*logits.chunk(2))))
            harmed.append(float((change > 0).sum()) / max(counted, 1))
            removed.append(1 - float(report.harm_after) / harm if harm > 0 else math.nan)
        check = self_check(model, reducer.head_name, optimizers, Primum(), "auto", loss_fn, batch)
    added = median(seconds) / median(plain) - 1
    spreads = Spread.of(shares), Spread.of(harmed), Spread.of(removed)
    return Diagnosis(*spreads, added, check, per)


def _step(
    model: nn.Module, optimizers: list[Optimizer], batch: Any, loss_fn: LossFn
) -> tuple[Tensor, float]:
    """Losses of the batch before the step, and the seconds of it."""
    start = time.perf_counter()
    model.zero_grad()
    losses = loss_fn(model, batch)
    if losses.dim() == 0:
        raise ValueError('loss_fn must return one loss per sample: use reduction="none"')
    torch.autograd.backward(losses.mean())
    for each in optimizers:
        each.step()
    if losses.device.type != "cpu":
        torch.accelerator.synchronize(losses.device)
    return losses.detach(), time.perf_counter() - start


@contextmanager
def _untouched(model: nn.Module, batches: Any) -> Iterator[None]:
    """Put back all random states: torch's, Python's, numpy's and those of a DataLoader."""
    numpy: Any = sys.modules.get("numpy")
    holders = (batches, getattr(batches, "sampler", None))
    owned = [getattr(each, "generator", None) for each in holders]
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    states += [(numpy.random.set_state, numpy.random.get_state())] if numpy else []
    states += [(g.set_state, g.get_state()) for g in owned if isinstance(g, torch.Generator)]
    devices = [each for each in {p.device for p in model.parameters()} if each.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for put_back, state in states:
            put_back(state)
