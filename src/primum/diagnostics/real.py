"""The truth beyond first order: each sample's loss, measured before and after a real step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.compat import unhooked
from primum.diagnostics.gradients import randomness, sample_losses
from primum.diagnostics.interference import FirstOrder, first_order
from primum.diagnostics.probe import Probe


@dataclass(frozen=True, eq=False)
class RealStep:
    """What one step of the optimizer did to each sample of its batch.

    In float32 a loss of 2 is known to about 2e-7: changes as small as that are rounding.

    Attributes:
        before: Losses before the step. [B].
        after: Losses after it, with the same dropout masks. [B].
        predicted: Change of each loss to first order, `gradient . displacement`. [B].
    """

    before: Tensor
    after: Tensor
    predicted: Tensor

    @property
    def change(self) -> Tensor:
        """Real change of each loss. [B]."""
        return self.after - self.before

    @property
    def harmed(self) -> Tensor:
        """Fraction of the batch whose loss really rose."""
        return (self.change > 0).to(self.change.dtype).mean()

    @property
    def sign_right(self) -> Tensor:
        """Fraction of the batch for which first order says rightly whether the loss rises."""
        same = (self.change > 0) == (self.predicted > 0)
        return same.to(self.change.dtype).mean()

    @property
    def correlation(self) -> Tensor:
        """Of predicted and real change over the batch (Pearson); NaN if one of them is constant."""
        return torch.corrcoef(torch.stack((self.change, self.predicted)))[0, 1]


def real_steps(
    probe: Probe,
    extra_weights: Mapping[str, Tensor],
    first: Mapping[str, FirstOrder] | None = None,
) -> dict[str, RealStep]:
    """Step copies of parameters and optimizer, plainly and with each weighting, and look.

    The losses are those of the copies with the model's own buffers. "plain" is always among the
    results; `reor(found["plain"].change, found[name].change)` is the real harm removed.

    Args:
        probe: What to step.
        extra_weights: name -> [B].
        first: `first_order(probe, extra_weights)`, if that is known already.
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
    """The parameters after a step of a copy of the optimizer. By name."""
    clones = {}
    for name, (param, _) in probe.moved.items():
        clone = clones[name] = nn.Parameter(param.detach().clone())
        vars(clone).update(vars(param))  # some optimizers read marks set on the parameter
        clone.grad = gradients[name].to(param.dtype)
    memo: dict[int, Any] = {id(probe.moved[name][0]): clone for name, clone in clones.items()}
    owners = {id(owner): owner for _, owner in probe.moved.values()}
    with randomness(probe.device, probe.seed), torch.enable_grad():
        for optimizer in owners.values():
            _step_copy(optimizer, memo)
    return {name: clone.detach() for name, clone in clones.items()}


def _step_copy(optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """Step a copy that holds the copied parameters, without hooks or patches of `step`."""
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
