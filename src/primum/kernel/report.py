"""What one step did, kept on the device until it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from primum.kernel.problem import Solution


@dataclass(frozen=True, eq=False)
class StepReport:
    """First-order effect of one optimizer step on the samples of its batch.

    All values are per unit learning rate, stay on the model's device and are computed when read;
    `as_dict()` reads them all at once. If `approximate`, the values that depend on the extra
    weights (`drift_after`, `harm_after`, `harmed_after`, `gap`) refer to the approximate problem;
    `drift` is always exact.

    Attributes:
        solution: The solution of the step's problem.
        drift: Change of `loss_i / B` under the plain step, per unit lr; positive means harmed. [B].
        fallbacks: Number of backward passes so far that fell back to plain gradients.
        discarded: Number of backward passes so far that were reweighted, but whose gradients no
            optimizer step used.
        weighted: Whether the weights were applied, without a check for non-finite values.
        why: Why they were not applied; empty if they were.
        own: The rows of this rank, if several ranks solved together: all vectors then cover the
            global batch, in the order of ranks. Otherwise all rows.
        per: What is reweighted: "sample" or "token".
        approximate: Whether the Gram operator was approximated: per token, with a large vocabulary.
    """

    solution: Solution
    drift: Tensor
    fallbacks: Tensor
    discarded: Tensor
    weighted: bool
    why: str = ""
    own: slice = field(default_factory=lambda: slice(None))
    per: str = "sample"
    approximate: bool = False

    @property
    def finite(self) -> Tensor:
        """Whether the values of the step were finite; if not, the weights are zero."""
        return self.objective < torch.inf

    @property
    def applied(self) -> bool:
        """Whether the weights were applied to the gradients. Waits for the device."""
        return self.weighted and bool(self.finite)  # SYNC: asked for

    @property
    def reason(self) -> str:
        """Why the weights were not applied; empty if they were. Waits for the device."""
        if self.weighted and not self.applied:
            return "the step's values were not finite"
        return self.why

    @property
    def extra_weights(self) -> Tensor:
        """Extra weight of each sample: its gradient counts `1 + w` times. [B].

        Under `observe`, the weight that `attach` would have applied.
        """
        return self.solution.extra_weights

    @property
    def drift_after(self) -> Tensor:
        """Change of each sample's loss with the extra weights. [B]."""
        return self.solution.drift_after

    @property
    def objective(self) -> Tensor:
        """Value of the step's problem at the extra weights."""
        return self.solution.objective

    @property
    def lower_bound(self) -> Tensor:
        """Certified lower bound on the optimal value of that problem."""
        return self.solution.lower_bound

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
        """Fraction of the samples with a loss whose loss the plain step raises."""
        return self._share_of_positive(self.drift)

    @property
    def harmed_after(self) -> Tensor:
        """Fraction of the samples with a loss whose loss the step raises with the weights."""
        return self._share_of_positive(self.drift_after)

    @property
    def gap(self) -> Tensor:
        """Certified bound on the distance to the optimum, relative to `harm_before`."""
        distance = (self.objective - self.lower_bound).clamp_min(0)
        harm = self.harm_before
        return torch.where(harm == 0, 0.0, distance / harm)

    @property
    def mean_extra_weight(self) -> Tensor:
        """Mean of the extra weights over the samples with a loss."""
        return self.extra_weights.sum() / self._counted()

    def as_dict(self) -> dict[str, float]:
        """Return plain floats for any logger. Waits for the device once."""
        names = (
            "harm_before",
            "harm_after",
            "harmed_before",
            "harmed_after",
            "mean_extra_weight",
            "gap",
            "fallbacks",
            "discarded",
            "finite",
        )
        values = torch.stack([getattr(self, name).to(self.drift) for name in names])
        figures = dict(zip(names, values.tolist(), strict=True))  # SYNC: asked for
        return figures | {"applied": float(self.weighted) * figures.pop("finite")}

    def _counted(self) -> Tensor:
        """Rows with a loss, all if none has: ignored targets and masked rows have zero drift."""
        counted = (self.drift != 0).sum()
        return torch.where(counted > 0, counted, len(self.drift))

    def _share_of_positive(self, values: Tensor) -> Tensor:
        positive = torch.where(values.isnan(), values, (values > 0).to(values.dtype))
        return positive.sum() / self._counted()
