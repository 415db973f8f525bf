"""How much of a step's effect is the same for all samples, to judge if reweighting can help."""

from __future__ import annotations

from torch import Tensor


def common_shift(before: Tensor, after: Tensor) -> Tensor:
    """Share of a step's logit change that is common to all samples.

    1 if the logits of every sample change alike, 0 if the changes average out, about 1 / B if they
    are unrelated. A constant added to all logits of a sample does not change the softmax and is
    ignored. NaN if nothing else changed.

    Args:
        before: Logits of a batch before an optimizer step. [..., C].
        after: Logits of the same inputs after it. [..., C].

    Returns:
        Squared norm of the mean change over the mean squared norm of a change, between 0 and 1.

    Example:
        >>> before = torch.zeros(3, 2)
        >>> common_shift(before, before + torch.tensor([1.0, -1.0]))
        tensor(1.)
    """
    if before.shape != after.shape:
        raise ValueError(
            f"logits before and after must have the same shape, got {tuple(before.shape)} and "
            f"{tuple(after.shape)}"
        )
    change = (after.detach().float() - before.detach().float()).flatten(0, -2)
    change = change - change.mean(-1, keepdim=True)
    return change.mean(0).square().sum() / change.square().sum(-1).mean()
