"""Which losses the explicit form takes, `loss = reducer(losses)`, and what to do about others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from primum.capture import rows_of, samples


def check_tensor(losses: Any) -> None:
    """Refuse what is no tensor of losses, such as the output of a model."""
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        found = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(
            "losses must be a floating-point tensor with one loss per sample or token, got "
            f'{found}; compute them with reduction="none"'
        )


def check_count(losses: Tensor, gradients: Sequence[Tensor], per: str) -> None:
    """Refuse losses that are not one for each sample, or token, that the head saw.

    Of samples that are maps, [B, H, W, d], also one for each pixel. `gradients` are those at the
    head's output, one for each call of the head.
    """
    count, seen = losses.numel(), [rows_of(each, per) for each in gradients]
    pixels = {rows_of(each, "token") if each.dim() > 3 else 0 for each in gradients}
    if losses.dim() > 0 and {count} in (set(seen), pixels):
        return
    todo = 'compute them with reduction="none"'
    if losses.dim() == 0:
        todo += ", or call .backward() on this loss itself: the hook then applies the weights"
    elif len(seen) > 1 and sum(seen) == count:
        todo = "call reducer on the losses of each call of the head, or call the head once for all"
    elif per == "sample" and count == rows_of(gradients[0], "token"):
        todo = 'average them over the positions of each sample, or pass per="token" to attach'
    calls = " and ".join(map(str, seen))
    raise ValueError(
        f"losses must have one entry per {per}, got shape {list(losses.shape)}: the head saw "
        f"{calls} {per}s, but there are {count} losses; {todo}"
    )


def check_row_order(losses: Tensor, calls: Sequence[GradientEdge], per: str) -> None:
    """Refuse losses that were permuted after the head, or transposed: each has its row's weight.

    Looks at the second loss that is not zero: transposing leaves the first and the last in place.
    """
    flat = losses.flatten()
    second = flat.detach().nonzero()[1:2].flatten()  # SYNC: once for a run
    of_one = torch.autograd.grad(
        flat[second].sum(), calls, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    reached = torch.stack([samples([each], per).flatten(1).any(1) for each in of_one]).any(0)
    own = second // max(flat.numel() // max(len(reached), 1), 1)
    if reached.any() and not reached[own].any():  # SYNC
        raise ValueError(
            f"losses are not in the order of the head's {per}s: loss {int(second)} depends on "
            f"{per} {int(reached.nonzero()[0])} (transposed or sorted after the head?); restore "
            "that order, or call .backward() on their mean: the hook then applies the weights"
        )


def weighted_mean(losses: Tensor, extra_weights: Tensor) -> Tensor:
    """The mean of the losses times `1 + w`, of [B] or of the pixels of B samples.

    A second call on losses of the same forward pass comes with the weights of the first.
    """
    rows = max(len(extra_weights), 1)  # a rank may have no samples
    if losses.numel() % rows:
        raise ValueError(
            f"losses of shape {list(losses.shape)} do not fit the {rows} weights already computed "
            "for this forward pass; call .backward() on what reducer(losses) returned instead of "
            "passing it to reducer again"
        )
    weights = (1 + extra_weights).to(losses.dtype).unsqueeze(1)
    return (weights * losses.reshape(rows, -1)).mean()
