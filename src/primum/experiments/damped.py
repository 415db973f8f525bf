"""Plain training with a smaller gradient in one direction: the one that moves all logits alike.

The mean over the batch of the gradients at the head's output raises the logits of some classes and
lowers those of others, for all samples alike. This arm removes a share of it. No sample gets more
weight than another: what it gains, it gains by damping that direction alone.
"""

from __future__ import annotations

from torch import Tensor

from primum.experiments.methods import Unhooked


class Damped(Unhooked):
    """A share `damping` of the mean gradient at the logits is taken from each sample's gradient.

    Leaves no reports: the gradients that arrive at the head are not those of single losses.
    """

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        def damp(gradient: Tensor) -> Tensor:
            return gradient - self.arm.damping * gradient.mean(0)

        if logits.requires_grad:
            logits.register_hook(damp)  # type: ignore[no-untyped-call]
        return super().losses(logits, targets)
