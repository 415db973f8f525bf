"""Plain training with a damped common shift of the logits.

The mean gradient at the head's output, over the batch, raises the logits of some classes and lowers
those of others, equally for all samples. This arm removes a share of it. No sample gets extra
weight, so any gain comes from damping that direction alone.
"""

from __future__ import annotations

from torch import Tensor

from primum.experiments.methods import Unhooked


class Damped(Unhooked):
    """Subtracts a share `damping` of the mean logit gradient from each sample's gradient.

    Steps have no reports, because the gradients at the head are not those of single losses.
    """

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        def damp(gradient: Tensor) -> Tensor:
            return gradient - self.arm.damping * gradient.mean(0)

        if logits.requires_grad:
            logits.register_hook(damp)  # type: ignore[no-untyped-call]
        return super().losses(logits, targets)
