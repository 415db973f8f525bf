"""6 - What one step did, on the device until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepReport:
    """First-order effect of one optimizer step on the samples of its batch.

    Everything is per unit learning rate and lives where the model lives; figures are computed when
    read, and nothing waits for the device before `as_dict()`.

    Attributes:
        extra_weights: Extra weight of each sample; its gradient counted `1 + w` times. Under
            `observe`, what it would have been. [B].
        drift: Change of each sample's loss under the plain step; positive means harmed. [B].
        drift_after: The same with the extra weights. [B].
        objective: Value of the step's problem at the extra weights.
        lower_bound: Proven smallest value of that problem.
        fallbacks: Steps so far that fell back to plain gradients.
        applied: Whether the weights went into the gradients. They are zero, and the drift is NaN,
            in a step whose values were not finite.
        reason: Why they did not, in words; empty if they did.
    """

    extra_weights: Tensor
    drift: Tensor
    drift_after: Tensor
    objective: Tensor
    lower_bound: Tensor
    fallbacks: Tensor
    applied: bool
    reason: str = ""

    @property
    def harm_before(self) -> Tensor:
        """Sum of the loss increases under the plain step."""
        return self.drift.clamp_min(0).sum()

    @property
    def harm_after(self) -> Tensor:
        """Sum of the loss increases with the extra weights."""
        return self.drift_after.clamp_min(0).sum()

    @property
    def harmed_before(self) -> Tensor:
        """Fraction of the batch whose loss the plain step raises."""
        return _share_of_positive(self.drift)

    @property
    def harmed_after(self) -> Tensor:
        """Fraction of the batch whose loss the step raises with the extra weights."""
        return _share_of_positive(self.drift_after)

    @property
    def gap(self) -> Tensor:
        """Certified distance to the best possible answer, relative to `harm_before`."""
        distance = (self.objective - self.lower_bound).clamp_min(0)
        harm = self.harm_before
        return torch.where(harm == 0, 0.0, distance / harm)

    @property
    def mean_extra_weight(self) -> Tensor:
        """Mean of the extra weights over the batch."""
        return self.extra_weights.mean()

    def as_dict(self) -> dict[str, float]:
        """Plain floats for any logger. Waits for the device, once."""
        names = (
            "harm_before",
            "harm_after",
            "harmed_before",
            "harmed_after",
            "mean_extra_weight",
            "gap",
            "fallbacks",
        )
        values = torch.stack([getattr(self, name).to(self.drift.dtype) for name in names])
        figures = dict(zip(names, values.tolist(), strict=True))  # SYNC: asked for
        return figures | {"applied": float(self.applied)}


def _share_of_positive(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), values, (values > 0).to(values.dtype)).mean()
