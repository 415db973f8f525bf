"""Effect of one step on each sample: by the head, by the backbone, and common to all samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import primum
from primum.diagnostics import Probe, first_order, measure
from primum.diagnostics.head import head_of, see_head
from primum.diagnostics.real import stepped
from primum.experiments.arms import Arm
from primum.experiments.epochs import Batch
from primum.experiments.methods import make_method
from primum.experiments.second_look import SecondLook
from primum.experiments.trainer import Trainer

RADIUS = 0.4
NETWORK_ITERS = 100  # of the whole network's problem
CHUNK = 32  # samples whose gradients are computed at a time

Row = dict[str, Any]


def moment(trainer: Trainer, unseen: Batch) -> dict[str, Row]:
    """Measure each weighting's step on the next batch, from the trainer's current state.

    One row per weighting: harm to first order in the head and in the whole network, `split` of the
    batch and of test images, and `less_harm`: whether it does less measured harm than the plain
    step. Does not change the trainer.
    """
    model, batch = trainer.model, trainer.coming
    model.train()
    probe = Probe(model, trainer.optimizer, nn.CrossEntropyLoss(), *batch[:2], chunk_size=CHUNK)
    interference = measure(probe)
    weights = weightings(trainer, batch, interference)
    first = first_order(probe, weights)
    head_gram, head_drift = see_head(probe).measure()
    unit = float(interference.lr) * probe.batch_size
    old = {name: param.detach() for name, param in model.named_parameters()}
    head = head_of(probe)
    states = {name: Moving(model, head, old, part) for name, part in
              (("batch", batch), ("test", unseen))}  # fmt: skip
    whole = interference.drift.sum(0)
    rows = {}
    for name, extra in ({"plain": torch.zeros_like(whole)} | weights).items():
        new = stepped(probe, first[name].gradients)
        row: Row = {
            "extra_weight": float(extra.mean()),
            "cosine": float(torch.cosine_similarity(extra, weights["primum"], dim=0)),
            "head_first": harm(unit * (head_drift - head_gram.times(extra))),
            "network_first": harm(unit * first[name].drift),
        }
        row |= {place: state.to(new) for place, state in states.items()}
        rows[name] = row
        least = rows["plain"]["batch"]["total"]["harm"]
        row["less_harm"] = float(row["batch"]["total"]["harm"] < least)
    pair = torch.stack((head_drift, whole))
    rows["plain"]["agreement"] = {
        "correlation": float(torch.corrcoef(pair)[0, 1]),
        "same_sign": float((pair[0].sign() == pair[1].sign()).float().mean()),
    }
    return rows


def weightings(trainer: Trainer, batch: Batch, interference: Any) -> dict[str, Tensor]:
    """Extra weights by name: primum's, those of both second looks, the network's, shuffled ones."""
    found = {}
    for look in ("head", "network"):
        model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
        optimizer.zero_grad()
        arm = Arm.parse(f"primum@radius={RADIUS},second_look={look}")
        method = make_method(replace(trainer.settings, arm=arm), model, optimizer)
        assert isinstance(method, SecondLook)
        method.backward(batch, 0, 1, observed=True)
        found["primum"] = method.first_weights
        found[f"second look, {look}"] = method.weights
        method.remove()
    problem = interference.problem(radius=RADIUS)
    found["network's weights"] = primum.solve(problem, NETWORK_ITERS).extra_weights
    order = torch.randperm(len(batch.ids), generator=torch.Generator().manual_seed(0))
    found["shuffled"] = found["primum"][order]
    return found


class Moving:
    """Images at the parameters before a step, and how their losses change by steps.

    Args:
        model: Without dropout or batch norm, so that samples do not mix.
        head: Its last layer.
        old: Parameters before the step, by name.
        batch: The images.
    """

    def __init__(
        self, model: nn.Module, head: nn.Linear, old: Mapping[str, Tensor], batch: Batch
    ) -> None:
        self.model, self.head, self.batch = model, head, batch
        (self.prefix,) = (name for name, each in model.named_modules() if each is head)
        self.features, self.old = self._features(old), self._head(old)

    def to(self, new: Mapping[str, Tensor]) -> Row:
        """Effect of a step to these parameters on the images."""
        return split(self.features, self._features(new), self.old, self._head(new),
                     self.batch.targets)  # fmt: skip

    def _head(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return params[f"{self.prefix}.weight"], params[f"{self.prefix}.bias"]

    @torch.no_grad()
    def _features(self, params: Mapping[str, Tensor]) -> Tensor:
        seen: list[Tensor] = []
        handle = self.head.register_forward_hook(lambda _, args, __: seen.append(args[0]))
        try:
            functional_call(self.model, dict(params), (self.batch.inputs,))
        finally:
            handle.remove()
        return seen[0]


def split(
    features: Tensor,
    moved: Tensor,
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    labels: Tensor,
) -> Row:
    """Change of each sample's loss, by cause.

    `total` is the sum of the changes by the head's step alone, by the backbone's alone, and by
    their `interaction`. `common_shift` is the norm of the mean change of the logits over the
    samples, `own_shift` the root mean square of the rest; `common` and `own` are the loss changes
    by either of them alone.

    Shapes: features, moved [N, d]; old and new: weight [C, d] and bias [C]; labels [N].
    """
    logits = {
        (head, body): F.linear(x, *part)
        for head, part in enumerate((old, new))
        for body, x in enumerate((features, moved))
    }
    start = logits[0, 0]
    before = F.cross_entropy(start, labels, reduction="none")

    def change(z: Tensor) -> Tensor:
        return F.cross_entropy(z, labels, reduction="none") - before

    total, by_head, by_body = (change(logits[key]) for key in ((1, 1), (1, 0), (0, 1)))
    shift = logits[1, 1] - start
    common = shift.mean(0)
    parts = {
        "total": total, "head": by_head, "backbone": by_body,
        "interaction": total - by_head - by_body,
        "common": change(start + common), "own": change(start + shift - common),
    }  # fmt: skip
    centred = total - total.mean()
    return {
        **{name: harm(each) for name, each in parts.items()},
        "head_share": float((centred * by_head).sum() / (centred * total).sum()),
        "common_shift": float(common.norm()),
        "own_shift": float((shift - common).square().sum(1).mean().sqrt()),
        "loss": float(before.mean()),
    }


def harm(changes: Tensor) -> dict[str, float]:
    """Mean change, mean of the increases alone, share of increases, standard deviation."""
    return {
        "mean": float(changes.mean()),
        "harm": float(changes.clamp_min(0).mean()),
        "harmed": float((changes > 0).float().mean()),
        "spread": float(changes.std()),
    }
