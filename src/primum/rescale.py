"""2 - What a loop does to gradients between backward and step: loss scaling, clipping.

The optimizer sees the gradient of backward times a factor. A GradScaler's part of it is known if
the scaler is; the rest (clipping by norm, a scaler that was not passed, a division by hand) is not
known before the step, so the last step's is used: it is measured after every step, on one vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.mailbox import Mailbox
from primum.ranks import Ranks
from primum.recipe import Recipe
from primum.watch import Watch

PARALLEL = 0.8  # Squared cosine above which one factor tells what was done to the gradient.
SAME = 1e-2  # A factor this close to 1 is taken for rounding: half precision has two digits.


class Rescale:
    """The factor between the gradients of backward and those of the step.

    Compares the gradients that came by since the last step, as they were handed on, with those the
    optimizer has just used: of the bias, or of the weight times a fixed vector. If the two vectors
    are far from parallel (a mean over ranks, a tied weight), the factor stays as it was, 1 at
    first. Nothing waits for the device.
    """

    def __init__(self, owners: dict[str, Optimizer], scaler: Any = None) -> None:
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self.scaler = scaler
        self.measured: Tensor | None = None  # the factor without the scaler's part
        self._mailbox = Mailbox()
        self._by_bias = owners.get("bias") is owners["weight"]
        self._probe: Tensor | None = None
        self._expected: Tensor | None = None
        self._complete = True
        self._task = -1

    @property
    def factor(self) -> Tensor | None:
        """What was measured last; None while that is 1, which the host may learn a step late."""
        if self.measured is None or self._mailbox.read(self.measured) == 1:
            return None
        return self.measured

    def begin(self, head: nn.Linear) -> None:
        """Gradients arrive. If none have accumulated, what came by before was thrown away.

        Several may arrive in one backward pass, none of them accumulated yet.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task and head.weight.grad is None:
            self.forget()
        self._task = task

    def forget(self) -> None:
        """No step was made, or will be, on what came by."""
        self._expected, self._complete = None, True

    def unscale(self, gradient: Tensor) -> Tensor | None:
        """What the scaler's scale is to be undone by: a 0-dim tensor, or None without a scaler."""
        if self.scaler is None:
            return None
        one = torch.ones((), device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return scale.reciprocal()

    def expect(
        self,
        handed_on: Tensor,
        features: Tensor,
        undo: Tensor | None,
        ranks: Ranks | None = None,
    ) -> None:
        """Gradients of the head's output have been handed on. [B, ..., d_out], [B, ..., d].

        `ranks` are those whose gradients will be averaged with these.
        """
        dtype = _wide(handed_on)
        if self._by_bias:
            positions = tuple(range(handed_on.dim() - 1))
            vector = handed_on.sum(positions, dtype=dtype) if positions else handed_on.to(dtype)
        else:
            rows, x = handed_on.reshape(-1, handed_on.shape[-1]), features.to(handed_on.dtype)
            vector = (rows.t() @ (x @ self._direction(x)).reshape(-1)).to(dtype)
        vector = vector if undo is None else vector * undo
        if ranks is not None:
            vector = ranks.sum(vector / ranks.size)
        self._expected = vector if self._expected is None else self._expected + vector

    def abstain(self, like: Tensor, ranks: Ranks) -> None:
        """Take part in a sum over ranks with nothing to say: then none of them measures."""
        ranks.sum(like.new_full(like.shape[-1:], torch.nan, dtype=_wide(like)))

    def miss(self) -> None:
        """Gradients came by that are not accounted for: this step tells nothing."""
        self._complete = False

    @torch.no_grad()
    def after_step(self, head: nn.Linear, found_inf: Tensor | None = None) -> None:
        """The optimizer has stepped on the gradients that are in `.grad` now, if all are finite."""
        expected, complete = self._expected, self._complete
        self.forget()
        grad = head.bias.grad if self._by_bias else head.weight.grad
        if expected is None or not complete or grad is None or grad.is_sparse:
            return
        if len(grad) != len(expected):  # the head has been replaced by one of another size
            return
        used = (grad if self._by_bias else grad @ self._direction(grad)).to(expected)
        both, own, other = used.dot(expected), expected.dot(expected), used.dot(used)
        parallel = (both > 0) & (both.square() >= PARALLEL * own * other)
        ratio = both / own
        ratio = torch.where((ratio - 1).abs() < SAME, 1.0, ratio)
        old = torch.ones_like(ratio) if self.measured is None else self.measured
        told = parallel & ratio.isfinite()
        if found_inf is not None:
            told = told & (found_inf == 0)
        self.measured = torch.where(told, ratio, old)

    def _direction(self, like: Tensor) -> Tensor:
        """A vector that features of no particular structure are orthogonal to. [d_in].

        Of length about 1: the products have the size of single gradients, which fit float16.
        """
        inputs = like.shape[-1]
        if self._probe is None or len(self._probe) != inputs:
            self._probe = torch.arange(inputs, dtype=torch.float32).cos_().div_(inputs**0.5)
        self._probe = self._probe.to(like)
        return self._probe


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Rollback:
    """Puts the recipe's state back where a GradScaler skipped the step it was for.

    A scaler skips silently. But `update()` gives it a new record of its optimizers, and if that is
    new while the optimizer has not stepped, the steps since were skipped.
    """

    def __init__(self, recipe: Recipe, watch: Watch, rescale: Rescale) -> None:
        self._recipe, self._watch, self._rescale = recipe, watch, rescale
        self._kept: tuple[Any, int, dict[str, Any]] | None = None

    def settle(self) -> None:
        """Before the recipe is used or saved: undo what never happened."""
        record = getattr(self._rescale.scaler, "_per_optimizer_states", None)
        if record is None or not self._watch.counts:
            return
        steps = self._watch.steps
        if self._kept is not None and self._kept[0] is not record:
            if self._kept[1] == steps:
                self._rescale.forget()
            if self._kept[1] == steps or self._skipped():
                self._recipe.load_state_dict(self._kept[2])
            self._kept = None
        if self._kept is None:
            self._kept = record, steps, self._recipe.state_dict()

    def _skipped(self) -> bool:
        """Whether a fused optimizer made its last step without moving."""
        found_inf = self._watch.found_inf
        # SYNC: with fused optimizers and recipes that have a state, alone.
        return bool(self._kept and self._kept[2]) and found_inf is not None and bool(found_inf)
