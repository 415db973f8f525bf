"""Loss changes beyond first order: each sample's loss before and after a real step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.diagnostics.gradients import randomness, sample_losses
from primum.diagnostics.interference import FirstOrder, first_order
from primum.diagnostics.probe import Probe
from primum.kernel.optimizers.dry_run import unhooked


@dataclass(frozen=True, eq=False)
class RealStep:
    """Measured effect of one optimizer step on each sample of its batch.

    In float32 a loss of 2 has a precision of about 2e-7; smaller changes are rounding errors.

    Attributes:
        before: Losses before the step. [B].
        after: Losses after the step, with the same dropout masks. [B].
        predicted: First-order change of each loss, `gradient . displacement`. [B].
    """

    before: Tensor
    after: Tensor
    predicted: Tensor

    @property
    def change(self) -> Tensor:
        """Measured change of each loss. [B]."""
        return self.after - self.before

    @property
    def harmed(self) -> Tensor:
        """Fraction of the batch whose loss rose."""
        return (self.change > 0).to(self.change.dtype).mean()

    @property
    def sign_right(self) -> Tensor:
        """Fraction of the batch whose loss change has the predicted sign."""
        same = (self.change > 0) == (self.predicted > 0)
        return same.to(self.change.dtype).mean()

    @property
    def correlation(self) -> Tensor:
        """Pearson correlation of predicted and measured change; NaN if one of them is constant."""
        return torch.corrcoef(torch.stack((self.change, self.predicted)))[0, 1]


def real_steps(
    probe: Probe,
    extra_weights: Mapping[str, Tensor],
    first: Mapping[str, FirstOrder] | None = None,
) -> dict[str, RealStep]:
    """Take the plain step, and the step with each weighting, on copies, and measure the losses.

    Losses are computed with the stepped copies of the parameters and the model's own buffers. The
    result always has an entry "plain"; `reor(found["plain"].change, found[name].change)` is the
    share of the measured harm that is removed.

    Args:
        probe: Model, optimizer, loss and batch.
        extra_weights: name -> [B].
        first: `first_order(probe, extra_weights)`, if already computed.
    """
    first = first or first_order(probe, extra_weights)
    _, lr = probe.shares()
    before = sample_losses(probe)
    return {
        key: RealStep(
            before=before,
            after=sample_losses(probe, stepped(probe, found.gradients)),
            predicted=found.drift * (probe.batch_size * lr),
        )
        for key, found in first.items()
    }


def stepped(probe: Probe, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, by name, after one step of a copy of the optimizer."""
    clones = {}
    for name, (param, _) in probe.moved.items():
        clone = clones[name] = nn.Parameter(param.detach().clone())
        vars(clone).update(vars(param))  # some optimizers read attributes of the parameter
        clone.grad = gradients[name].to(param.dtype)
    memo: dict[int, Any] = {id(probe.moved[name][0]): clone for name, clone in clones.items()}
    owners = {id(owner): owner for _, owner in probe.moved.values()}
    with randomness(probe.device, probe.seed), torch.enable_grad():
        for optimizer in owners.values():
            _step_copy(optimizer, memo)
    return {name: clone.detach() for name, clone in clones.items()}


def _step_copy(optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """Step a copy that holds the copied parameters, without hooks or a patched `step`."""
    twin: Optimizer = object.__new__(type(optimizer))
    parts = {
        key: OrderedDict() if key.endswith("_hooks") else value
        for key, value in vars(optimizer).items()
        if key != "step"
    }
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = dict.fromkeys(own - memo.keys())
    vars(twin).update(copy.deepcopy(parts, memo | {id(optimizer): twin} | others))
    for group in twin.param_groups:
        group["params"] = [param for param in group["params"] if param is not None]
    unhooked(type(twin).step)(twin)
