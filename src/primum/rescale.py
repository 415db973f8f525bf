"""2 - What a loop does to gradients between backward and step: loss scaling, clipping.

The optimizer sees the gradient of backward times a factor. A GradScaler's part of it is known if
the scaler is; the rest (clipping by norm, a scaler that was not passed, a division by hand) is not
known before the step, so the last step's is used: it is measured after every step, on one vector.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from primum.compat import eager, parameter
from primum.rules import Scalar, on_host, read, scalar, wide

PARALLEL = 0.8  # Squared cosine above which one factor describes the change of the gradient.
SAME = 1e-2  # A factor this close to 1 is taken for rounding: half precision has two digits.


class Rescale:
    """Measures the factor between the gradients of backward and those of the step.

    Compares the gradients handed on since the last step with those that the optimizer has used: of
    the bias, or of the weight times a fixed vector. If the two vectors are far from parallel (a
    mean over ranks), the factor stays as it was, 1 at first. Nothing waits for the device.

    A weight that an embedding shares gets gradients that were not handed on here. There the whole
    gradient is noted once backward has accumulated it; over several ranks it is not known before
    their mean is taken, and the factor is not measured.

    Args:
        scaler: The loop's GradScaler, or None.
        by_bias: Whether one optimizer steps the weight and a bias.
        shared: The head's weight, if other modules use it as well.

    Attributes:
        measured: The factor without the scaler's part; None before the first measurement.
    """

    def __init__(self, scaler: Any, *, by_bias: bool, shared: Tensor | None = None) -> None:
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self.scaler = scaler
        self.measured: Scalar | None = None
        self._by_bias = by_bias
        self._probe: Tensor | None = None
        self._expected: Tensor | None = None
        self._handle: Any = None
        self._whole = shared is not None and not by_bias
        if shared is not None and self._whole:
            own = weakref.ref(self)
            after: Any = eager(lambda weight: _note(own(), weight))
            weight: Any = shared  # the stubs do not type what follows
            self._handle = weight.register_post_accumulate_grad_hook(after)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def factor(self) -> Scalar | None:
        """What was measured last; None where it is known to be 1."""
        known = not isinstance(self.measured, Tensor)
        return None if known and self.measured == 1 else self.measured

    def state(self) -> Tensor | None:
        if self.measured is None or isinstance(self.measured, Tensor):
            return None if self.measured is None else self.measured.clone()
        return torch.tensor(self.measured, dtype=torch.float64)

    def load(self, state: Tensor | None, device: torch.device) -> None:
        self.measured = None if state is None else scalar(state.to(device, copy=True))

    @property
    def expects(self) -> bool:
        """Whether gradients were handed on that no step has used yet."""
        return self._expected is not None

    def unscale(self, gradient: Tensor) -> Tensor | None:
        """The inverse of the scaler's scale as a 0-dim tensor; None without a scaler."""
        if self.scaler is None:
            return None
        one = torch.ones((), device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return scale.reciprocal()

    def forget(self, kept: Tensor | None = None) -> None:
        """Discard what was expected; with `kept`, only where that is False (a 0-dim tensor)."""
        if kept is None or self._expected is None:
            self._expected = None
        else:
            self._expected = torch.where(kept, self._expected, 0.0)

    def expect(
        self,
        handed_on: Tensor,
        features: Tensor,
        undo: Tensor | None,
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Note gradients that were handed on at the head's output. [B, ..., d_out], [B, ..., d].

        `undo` removes the loss scaling; `mean` averages over the ranks whose gradients will be.
        """
        if self._whole:
            return
        dtype = wide(handed_on.dtype)
        if self._by_bias:
            positions = tuple(range(handed_on.dim() - 1))
            vector = handed_on.sum(positions, dtype=dtype) if positions else handed_on.to(dtype)
        else:
            rows, x = handed_on.reshape(-1, handed_on.shape[-1]), features.to(handed_on.dtype)
            vector = (rows.t() @ (x @ self._direction(x)).reshape(-1)).to(dtype)
        self._expect(vector, undo, mean)

    def expect_gradient(self, weight: Tensor, bias: Tensor | None, undo: Tensor | None) -> None:
        """The same, where the gradients of weight and bias themselves are at hand."""
        if self._by_bias and bias is not None:
            vector = bias.to(wide(bias.dtype))
        else:
            vector = (weight @ self._direction(weight)).to(wide(weight.dtype))
        self._expect(vector, undo, None)

    def _expect(
        self, vector: Tensor, undo: Tensor | None, mean: Callable[[Tensor], Tensor] | None
    ) -> None:
        vector = vector if undo is None else vector * undo
        if mean is not None:
            vector = mean(vector)
        self._expected = vector if self._expected is None else self._expected + vector

    def miss(self, like: Tensor, mean: Callable[[Tensor], Tensor] | None = None) -> None:
        """Mark gradients that were not noted: the coming step is not measured.

        Under `mean` this contributes NaN to the average, so that every rank skips it.
        """
        if self._whole:
            return
        unknown = torch.full(
            (like.size(-1),), torch.nan, dtype=wide(like.dtype), device=like.device
        )
        self._expected = unknown if mean is None else mean(unknown)

    @torch.no_grad()
    def note(self, grad: Tensor) -> None:
        """Note the whole gradient of a shared weight, as backward has left it. [d_out, d]."""
        self.forget()  # this has all of it
        self.expect_gradient(grad, None, self.unscale(grad))

    @torch.no_grad()
    def after_step(
        self,
        head: Any,
        found_inf: Tensor | None = None,
        rows: slice | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Measure on the gradients in `.grad`, which the optimizer has just used.

        Of a head that is split over ranks these are some `rows`, and `total` sums over the ranks.
        """
        expected = self._expected
        self.forget()
        if expected is not None and rows is not None:
            expected = expected[rows]
        grad = head.bias.grad if self._by_bias else head.weight.grad
        if expected is None or grad is None or grad.is_sparse:
            return
        if len(grad) != len(expected):  # the head has been replaced by one of another size
            return
        used = (grad if self._by_bias else grad @ self._direction(grad)).to(expected)
        both, own, other = used.dot(expected), expected.dot(expected), used.dot(used)
        if total is not None:
            both, own, other = total(torch.stack((both, own, other))).unbind()
        if on_host(both):  # host memory: reading it is no sync, and saves operations
            self._keep(read(both), read(own), read(other), found_inf)
            return
        parallel = (both > 0) & (both.square() >= PARALLEL * own * other)
        ratio = both / own
        ratio = torch.where((ratio - 1).abs() < SAME, 1.0, ratio)
        known = parallel & ratio.isfinite()
        if found_inf is not None:
            known = known & (found_inf == 0)
        self.measured = torch.where(known, ratio, 1.0 if self.measured is None else self.measured)

    def _keep(self, both: float, own: float, other: float, found_inf: Tensor | None) -> None:
        """The same on numbers of the host."""
        parallel = both > 0 and both * both >= PARALLEL * own * other
        skipped = found_inf is not None and bool(found_inf)
        ratio = both / own if parallel else math.nan
        if not skipped and math.isfinite(ratio):
            self.measured = 1.0 if abs(ratio - 1) < SAME else ratio

    def _direction(self, like: Tensor) -> Tensor:
        """A vector that features of no particular structure are orthogonal to. [d_in].

        Of length about 1: the products have the size of single gradients, which fit float16.
        """
        inputs = like.shape[-1]
        if self._probe is None or len(self._probe) != inputs:
            self._probe = torch.arange(inputs, dtype=torch.float32).cos_().div_(inputs**0.5)
        self._probe = self._probe.to(like)
        return self._probe


def shared_weight(model: nn.Module, head: nn.Linear) -> Tensor | None:
    """The head's weight, if another module of the model has it, too; as a tied embedding does."""
    weight = parameter(head, "weight")
    others = (own for module in model.modules() if module is not head for own in _own(module))
    return weight if any(own is weight for own in others) else None


def _own(module: nn.Module) -> list[Tensor]:
    return list(module.parameters(recurse=False))


def _note(rescale: Rescale | None, weight: Tensor) -> None:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    grad = weight.grad
    if rescale is not None and grad is not None and not (several or grad.is_sparse):
        try:
            rescale.note(grad)
        except Exception:  # what failed here fails in the pass as well, and is counted there
            rescale.forget()
