"""The explicit form, `loss = reducer(losses)`: which losses it takes, and the weighted mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from primum.hooks.head_hook import HeadCall, HeadHook, nodes_behind
from primum.kernel.batch import count_rows, rows_of
from primum.kernel.engine import Call


def weighted_loss(hook: HeadHook | None, losses: Tensor) -> Tensor:
    """The mean of the weighted losses; the plain mean where the hook applies the weights."""
    _check_tensor(losses)
    mean, engine = losses.mean(), None if hook is None else hook.engine
    if hook is None or engine is None or engine.idle or not (hook.enabled and mean.requires_grad):
        return mean
    calls = HeadCall.behind(losses, hook)
    if not calls:
        weight = engine.head.weight
        frozen = weight is not None and not weight.requires_grad  # it trains something else
        hidden = any("CheckpointFunction" in each.name() for each in nodes_behind(losses, hook))
        if frozen or hidden or hook.compiled:
            return mean
        raise ValueError(
            f"losses do not depend on the head's output ({engine.head.name!r}); compute them "
            "from a forward pass that calls it, after attaching and with gradients enabled"
        )
    first = next(iter(calls))
    if not first.weighted:
        gradients = torch.autograd.grad(mean, list(calls.values()), retain_graph=True)
        per = engine.layout.terms_of(losses, gradients[0])
        arranged = _arranged(losses, calls, gradients, per, check_order=not hook.checked_losses)
        hook.checked_losses = True
        weighted = engine.reweight(*arranged, terms=per)
        extra_weights = None
        if weighted is not None and engine.last is not None:
            extra_weights = engine.last.extra_weights[engine.last.own]
        for each in calls:
            each.weighted, each.extra_weights = True, extra_weights
    return mean if first.extra_weights is None else _weighted_mean(losses, first.extra_weights)


def _check_tensor(losses: Any) -> None:
    """Refuse what is no tensor of losses, such as the output of a model."""
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        found = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(
            "losses must be a floating-point tensor with one loss per sample or token, got "
            f'{found}; compute them with reduction="none"'
        )


def _arranged(
    losses: Tensor,
    calls: Mapping[HeadCall, GradientEdge],
    gradients: Sequence[Tensor],
    per: str,
    *,
    check_order: bool,
) -> tuple[Sequence[Call], Sequence[Tensor]]:
    """The calls of the head and their gradients, such that row i belongs to loss i.

    The head may have run several times for the same samples, once for some and once for others
    (`cat` of the losses of each call), or on several rows for each loss: choices of a question, a
    chosen and a rejected answer. Of samples that are maps, [B, H, W, d], there may be a loss for
    each pixel. `gradients` are those at the head's output, one for each call.
    """
    count, seen = losses.numel(), [count_rows(each, per) for each in gradients]
    pixels = {count_rows(each, "token") if each.dim() > 3 else 0 for each in gradients}
    if losses.dim() > 0 and {count} in (set(seen), pixels):
        if check_order:
            _check_row_order(losses, list(calls.values()), per)
        return list(calls), gradients
    if losses.dim() > 0 and len(seen) > 1 and sum(seen) == count:
        return _one_after_another(losses, calls, gradients, seen, per)
    if losses.dim() > 0 and per == "sample" and len(seen) == 1 and count and seen[0] % count == 0:
        call, gradient = next(iter(calls)), gradients[0]
        wanted = torch.arange(seen[0], device=gradient.device).view(count, -1)
        for rows in (wanted, wanted.view(-1, count).t()):  # side by side, or in blocks
            if _belong(losses, calls[call], rows, per):
                inputs, grads = rows_of([call.inputs()], per), rows_of([gradient], per)
                return [Arranged(inputs[rows], call)], [grads[rows]]
    raise ValueError(_mismatch(losses, gradients, seen, per))


class Arranged:
    """A call of the head whose rows were put in the order of the losses."""

    def __init__(self, inputs: Tensor, call: HeadCall) -> None:
        self._inputs, self.peers, self.before = inputs, call.peers, call.before

    def inputs(self) -> Tensor:
        return self._inputs


def _one_after_another(
    losses: Tensor,
    calls: Mapping[HeadCall, GradientEdge],
    gradients: Sequence[Tensor],
    seen: Sequence[int],
    per: str,
) -> tuple[Sequence[Call], Sequence[Tensor]]:
    """Calls that saw some of the samples each, in the order of their losses, as one call."""
    inputs: list[Tensor] = []
    grads: list[Tensor] = []
    left = dict(zip(calls, gradients, strict=True))
    while left:
        first = sum(len(each) for each in grads)
        call = next((c for c in left if _reached(losses, first, calls[c], per).any()), None)  # SYNC
        if call is None:
            raise ValueError(_mismatch(losses, gradients, seen, per))
        inputs.append(rows_of([call.inputs()], per))
        grads.append(rows_of([left.pop(call)], per))
    both = torch.cat(inputs), torch.cat(grads)
    return [Arranged(both[0].unsqueeze(1), next(iter(calls)))], [both[1].unsqueeze(1)]


def _reached(losses: Tensor, one: int, call: GradientEdge, per: str) -> Tensor:
    """Which rows of a call one of the losses depends on. [rows]."""
    (grad,) = torch.autograd.grad(
        losses.flatten()[one], [call], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return rows_of([grad], per).flatten(1).any(1)


def _belong(losses: Tensor, call: GradientEdge, rows: Tensor, per: str) -> bool:
    """Whether the second loss depends on its rows of the head and on no others. rows [B, k]."""
    reached = _reached(losses, min(1, len(rows) - 1), call, per)
    own = reached[rows[min(1, len(rows) - 1)]]
    return bool(own.any() & (own.sum() == reached.sum()))  # SYNC


def _mismatch(losses: Tensor, gradients: Sequence[Tensor], seen: Sequence[int], per: str) -> str:
    count, todo = losses.numel(), 'compute them with reduction="none"'
    if losses.dim() == 0:
        todo += ", or call .backward() on this loss itself: the hook then applies the weights"
    elif per == "sample" and count == count_rows(gradients[0], "token"):
        todo = 'average them over the positions of each sample, or pass per="token" to attach'
    elif len(seen) == 1 and count and seen[0] % count == 0:
        todo = "each loss must depend on as many rows of the head, and on no others"
    calls = " and ".join(map(str, seen))
    return (
        f"losses must have one entry per {per}, got shape {list(losses.shape)}: the head saw "
        f"{calls} {per}s, but there are {count} losses; {todo}"
    )


def _check_row_order(losses: Tensor, calls: Sequence[GradientEdge], per: str) -> None:
    """Refuse losses that were permuted after the head, or transposed: each has its row's weight.

    Looks at the second loss that is not zero: transposing leaves the first and the last in place.
    """
    flat = losses.flatten()
    second = int((flat.detach().nonzero()[1:2].flatten().tolist() or [0])[0])  # SYNC: once
    reached = torch.stack([_reached(losses, second, each, per) for each in calls]).any(0)
    own = second // max(flat.numel() // max(len(reached), 1), 1)
    if reached.any() and not reached[own]:  # SYNC
        raise ValueError(
            f"losses are not in the order of the head's {per}s: loss {second} depends on "
            f"{per} {int(reached.nonzero()[0])} (transposed or sorted after the head?); restore "
            "that order, or call .backward() on their mean: the hook then applies the weights"
        )


def _weighted_mean(losses: Tensor, extra_weights: Tensor) -> Tensor:
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
