"""What a loop does to gradients between backward and step: loss scaling, clipping.

The optimizer sees the gradient of backward times a factor. A GradScaler's part of it is known if
the scaler is; the rest (clipping by norm, a scaler that was not passed, a division by hand) is not
known before the step, so the last step's is used. It is measured on what is in `.grad`, at the end
of the backward pass and right before the step: an optimizer may write into `.grad` itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from primum.hooks.private import at_end_of_backward, is_sharded, version
from primum.kernel.engine import Observer
from primum.kernel.head import Head
from primum.kernel.scalars import Scalar, accum_dtype, on_host, scalar

PARALLEL = 0.999  # Squared cosine above which one factor describes the change of the gradient.
WHOLE = 1 << 16  # Entries of a weight up to which they are compared one by one.
SAME = 1e-2  # A factor this close to 1, or to another, is rounding: half precision has two digits.


class MeasuredScale(Observer):
    """Measures the factors between the gradients of backward and those of the step.

    Entry by entry; of a large weight, its product with a fixed vector. If what the step uses is
    not parallel to what backward left (clipping by value, ranks averaged by hand), the factor stays
    as it was, 1 at first. Nothing waits for the device, and over ranks nothing is sent: under
    DistributedDataParallel and fully_shard `.grad` is the ranks' mean at the end of the pass.

    Args:
        head: Whose gradients are measured.
        scaler: The loop's GradScaler, or None.
    """

    def __init__(self, head: Head, scaler: Any) -> None:
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self.scaler: Any = scaler
        self._head: Any = weakref.proxy(head)  # which holds this
        self._factors: dict[str, Any] = {}  # numbers, or 0-dim tensors of a device
        self._left: dict[str, Tensor] = {}  # by backward, in vectors, without loss scaling
        self._before: dict[str, tuple[int, int]] = {}
        self._direction: Tensor | None = None

    def unscale(self, gradient: Tensor) -> Tensor | None:
        if self.scaler is None:
            return None
        one = torch.ones((), device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return scale.reciprocal()

    def factor(self, part: str) -> Scalar:
        factor: Scalar = self._factors.get(part, 1.0)
        return factor

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        if not again:
            self._before = _marks(self._head.grads())
            at_end_of_backward(self._note)

    @torch.no_grad()
    def _note(self) -> None:
        """A backward pass is over; `torch.autograd.grad` has left `.grad` as it was."""
        self._left = {}
        with suppress(Exception):  # an error of ours, or of the scaler's: nothing is measured
            grads = self._head.grads() if self._head.alive else {}
            left = {} if _marks(grads) == self._before else self._vectors(grads)
            unscale = self.unscale(next(iter(left.values()))) if left else None
            self._left = left if unscale is None else {k: v * unscale for k, v in left.items()}

    def _vectors(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dense = {
            part: grad
            for part, grad in grads.items()
            if grad.layout == torch.strided and not is_sharded(grad)  # sharded after attach
        }
        found = {}
        for part, grad in dense.items():
            dtype = accum_dtype(grad.dtype)
            if grad.numel() <= WHOLE:
                found[part] = grad.flatten().to(dtype, copy=True)
            else:
                found[part] = (grad @ self._along(grad)).to(dtype)
        return found

    def _along(self, grad: Tensor) -> Tensor:
        """A vector of length about 1 that gradients of no particular structure do not avoid."""
        inputs = grad.shape[1]
        if self._direction is None or len(self._direction) != inputs:
            steps = torch.arange(inputs, dtype=torch.float32, device="cpu")
            self._direction = steps.cos_().div_(inputs**0.5)
        self._direction = self._direction.to(grad)
        return self._direction

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        """The optimizer is about to use what is in `.grad`."""
        if not self._left:
            return
        held = [part for part, each in self._head.optimizers.items() if each is optimizer]
        grads = self._head.grads()
        used = self._vectors({part: grads[part] for part in held if part in grads})
        left = {part: self._left.pop(part) for part in used if part in self._left}
        parts = [part for part in left if left[part].shape == used[part].shape]
        if not parts:
            return
        sums = [each for part in parts for each in _products(left[part], used[part].to(left[part]))]
        both, own, other = torch.stack(sums).view(-1, 3).unbind(1)
        # A fused optimizer takes the loss scaling away itself, and skips the step if it overflowed.
        scale, found_inf = getattr(optimizer, "grad_scale", None), _found_inf(optimizer)
        ratio = both / own if scale is None else both / own / scale
        known = (both >= (PARALLEL * own * other).sqrt()) & ratio.isfinite()
        if found_inf is not None:
            known = known & (found_inf.to(known.device) == 0)
        ratio = torch.where((ratio - 1).abs() < SAME, 1.0, ratio)
        if on_host(ratio):
            found = zip(parts, ratio.tolist(), known.tolist(), strict=True)  # host memory: no sync
            self._factors |= {part: number for part, number, sure in found if sure}
            weight, bias = (self._factors.get(part) for part in ("weight", "bias"))
            if weight is not None and bias is not None and abs(weight - bias) < SAME * weight:
                self._factors["bias"] = weight
        else:
            before = [self.factor(part) for part in parts]
            kept = [torch.where(k, r, b) for k, r, b in zip(known, ratio, before, strict=True)]
            self._factors |= dict(zip(parts, kept, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        return {
            part: torch.as_tensor(factor, dtype=torch.float64).clone()
            for part, factor in self._factors.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self._head.layer.weight.device
        self._factors = {part: scalar(each.to(device, copy=True)) for part, each in state.items()}
        self._left = {}


def _products(left: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return used.dot(left), left.dot(left), used.dot(used)


def _found_inf(optimizer: Any) -> Tensor | None:
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, Tensor) else None


def _marks(grads: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """What shows whether gradients were changed; no references, as `model.to()` may swap them."""
    return {part: (id(grad), version(grad)) for part, grad in grads.items()}
