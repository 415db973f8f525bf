"""6 - What one step did, kept on the device until it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from primum.problem import Solution


@dataclass(frozen=True, eq=False)
class Exact:
    """What a step's extra weights do by the exact Gram operator, per unit learning rate.

    Attributes:
        drift: Change of each sample's loss under the plain step. [B].
        drift_after: The same with the extra weights. [B].
        excess: How far the change of the step leaves the trust region, as a fraction of its radius;
            0 inside.
    """

    drift: Tensor
    drift_after: Tensor
    excess: Tensor

    @property
    def harm_before(self) -> Tensor:
        """Sum of the loss increases under the plain step."""
        return self.drift.clamp_min(0).sum()

    @property
    def harm_after(self) -> Tensor:
        """Sum of the loss increases with the extra weights."""
        return self.drift_after.clamp_min(0).sum()


@dataclass(frozen=True, eq=False)
class StepReport:
    """First-order effect of one optimizer step on the samples of its batch.

    Everything is per unit learning rate and lives where the model lives; figures are computed when
    read, and nothing waits for the device before `as_dict()`. If `approximate`, what concerns the
    extra weights (`drift_after`, `harm_after`, `harmed_after`, `gap`) is about the problem that was
    solved, and `exact()` about the one it stands for; `drift` is exact in any case.

    Attributes:
        solution: Of the step's problem.
        drift: Change of each sample's loss under the plain step; positive means harmed. [B].
        fallbacks: Backward passes so far that fell back to plain gradients.
        discarded: Backward passes so far that were weighed, but whose gradients no step used.
        weighed: Whether the weights were put into the gradients, as far as the host knew then.
        why: Why they were not; empty if they were.
        own: Where several ranks solved together, all vectors here are those of the global batch, in
            the order of ranks, and these rows are of this rank. All rows otherwise.
        per: What has a weight of its own: "sample" or "token".
    """

    solution: Solution
    drift: Tensor
    fallbacks: Tensor
    discarded: Tensor
    weighed: bool
    why: str = ""
    own: slice = field(default_factory=lambda: slice(None))
    per: str = "sample"

    @property
    def finite(self) -> Tensor:
        """Whether the values of the step were finite; if not, the weights are zero."""
        return self.objective < torch.inf

    @property
    def applied(self) -> bool:
        """Whether the weights went into the gradients. Waits for the device."""
        return self.weighed and bool(self.finite)  # SYNC: asked for

    @property
    def reason(self) -> str:
        """Why the weights did not go into the gradients; empty if they did. Waits as `applied`."""
        if self.weighed and not self.applied:
            return "the values of the step were not finite"
        return self.why

    @property
    def approximate(self) -> bool:
        """Whether the Gram operator was approximated: per token, with a large vocabulary."""
        return self.solution.approximation is not None

    def exact(self) -> Exact:
        """What the weights do without the approximation, if there was one.

        That takes the gradients of all tokens, which no report keeps: set `reducer.measure_exact`
        to True before the backward pass.

        Raises:
            RuntimeError: if the step was approximated, and not measured.
        """
        approximation = self.solution.approximation
        if approximation is None:
            return Exact(self.drift, self.drift_after, torch.zeros_like(self.objective))
        if approximation.product is None:
            raise RuntimeError(
                "this step was not measured exactly, and its gradients are gone; set "
                "reducer.measure_exact = True before the backward pass, or attach with exact=True "
                "to solve exactly"
            )
        after = self.drift - approximation.product
        length = self.extra_weights.dot(approximation.product).clamp_min(0).sqrt()
        excess = torch.where(length > approximation.reach, length / approximation.reach - 1, 0.0)
        return Exact(self.drift, after, excess)

    @property
    def extra_weights(self) -> Tensor:
        """Extra weight of each sample: its gradient counted `1 + w` times. [B].

        Under `observe`, what it would have been.
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
        """Proven smallest value of that problem."""
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
            "discarded",
            "finite",
        )
        values = torch.stack([getattr(self, name).to(self.drift) for name in names])
        figures = dict(zip(names, values.tolist(), strict=True))  # SYNC: asked for
        return figures | {"applied": float(self.weighed) * figures.pop("finite")}


def _share_of_positive(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), values, (values > 0).to(values.dtype)).mean()
