"""Published alternatives on the whole network's gradients: UPGrad, and MGDA on groups.

Neither has a radius or uses the optimizer's step. Their steps have no reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError, torchjd_for
from primum.experiments.methods import Unhooked, autocast


class UpGradNetwork(Unhooked):
    """UPGrad (Quinton and Rey, 2024) on the Gram matrix of all per-sample gradients.

    TorchJD's autogram engine computes the matrix; it does not support batch norm.
    """

    def attach(self) -> None:
        with torchjd_for("upgrad-network"):
            from torchjd.aggregation import UPGradWeighting
            from torchjd.autogram import Engine

            self._weighting: Any = UPGradWeighting()
            self._engine = Engine(self.model, batch_dim=0)

    def weighted(self, losses: Tensor, batch: Batch) -> Tensor:
        self.weights: Tensor = self._weighting(self._engine.compute_gramian(losses)) * len(losses)
        if self.arm.upgrad_scale == "mean-1":
            self.weights = self.weights / self.weights.mean()
        return (self.weights.to(losses.dtype) * losses).mean()


class GroupMinNorm(Unhooked):
    """MGDA (Désidéri, 2012): the shortest convex combination of the gradients of several groups.

    Groups are consecutive samples of the batch, processed one after the other, so a step takes
    about as long as a plain one.
    """

    def attach(self) -> None:
        with torchjd_for("mgda"):
            from torchjd.aggregation import MGDAWeighting

            self._weighting: Any = MGDAWeighting()

    def backward(self, batch: Batch, step: int, steps: int, *, observed: bool) -> Tensor:
        if self.scaler is not None:
            raise UserError("mgda does not work with fp16; choose --precision bf16 or fp32")
        count = self.arm.groups
        if len(batch.inputs) % count:
            raise UserError(
                f"the batch of {len(batch.inputs)} cannot be split into {count} equal groups; "
                "groups must divide the batch size"
            )
        params = [param for param in self.model.parameters() if param.requires_grad]
        rows, total = [], torch.zeros((), device=batch.inputs.device)
        parts = zip(batch.inputs.chunk(count), batch.targets.chunk(count), strict=True)
        for images, targets in parts:
            with autocast(self.settings):
                logits = self.model(images)
            loss = self.losses(logits, targets).mean()
            gradients = torch.autograd.grad(loss, params)
            rows.append(torch.cat([each.reshape(-1) for each in gradients]))
            total = total + loss.detach() / count
        jacobian = torch.stack(rows)
        self.weights: Tensor = self._weighting(jacobian @ jacobian.T).to(jacobian.dtype)
        combined = (self.weights @ jacobian).split([param.numel() for param in params])
        for param, gradient in zip(params, combined, strict=True):
            param.grad = gradient.view_as(param).contiguous()
        return total
