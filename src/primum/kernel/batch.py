"""What one backward pass delivers at the head, by sample or token."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from primum.kernel.scalars import accum_dtype


@dataclass(frozen=True)
class HeadBatch:
    """Inputs and output gradients of the head, one row per sample.

    Attributes:
        inputs: [B, d] or [B, T, d], in any floating-point type.
        output_grads: As they arrived. [B, d_out] or [B, T, d_out].
        per: What a row is: "sample" or "token".
        unscale: What makes the output gradients those of the mean loss: undoes loss scaling,
            averages over ranks. None if nothing is needed.
        before: What earlier passes have left of the gradient, [d_out, d] or 0; None if that is
            what has accumulated in `.grad`.
    """

    inputs: Tensor
    output_grads: Tensor
    per: str = "sample"
    unscale: Tensor | None = None
    before: Tensor | float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in."""
        return accum_dtype(self.output_grads.dtype)

    @property
    def positions(self) -> int:
        """Of each row; 1 if it has no such dimension."""
        return 1 if self.inputs.dim() == 2 else self.inputs.shape[1]

    def features(self, trained: Container[str]) -> Tensor:
        """The inputs in working precision, with a column of ones if the "bias" is trained."""
        x = self.inputs.detach().to(self.dtype)
        return nn.functional.pad(x, (0, 1), value=1.0) if "bias" in trained else x

    def grads(self, outputs: slice | None = None) -> Tensor:
        """Gradients of some outputs, in working precision and unscaled."""
        some = self.output_grads
        if outputs is not None:
            some = some.narrow(-1, outputs.start, outputs.stop - outputs.start)
        some = some.to(self.dtype)
        return some if self.unscale is None else some * self.unscale


def rows_of(tensors: Sequence[Tensor], per: str) -> Tensor:
    """[d] -> [1, d]; [B, d] and [B, T, d] as they are; [B, H, W, d] -> [B, H * W, d].

    Per token, every row is a sample of its own: [B, T, d] -> [B * T, d]. Several calls of the head
    for the same samples, or tokens, count as positions of one: [B, positions, d].
    """
    tensors = [each.unsqueeze(0) if each.dim() == 1 else each for each in tensors]
    if per == "token":
        tensors = [each.flatten(0, -2) for each in tensors]
    tensors = [each.flatten(1, -2) if each.dim() > 3 else each for each in tensors]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([each.unsqueeze(1) if each.dim() == 2 else each for each in tensors], 1)


def count_rows(gradient: Tensor, per: str) -> int:
    """How many samples, or tokens, a gradient at the head's output is for."""
    if gradient.dim() == 1:
        return 1
    # `size`, unlike `shape`, works on nested tensors.
    return gradient.numel() // max(gradient.size(-1), 1) if per == "token" else gradient.size(0)


def reweight(gradients: Sequence[Tensor], extra_weights: Tensor, per: str) -> list[Tensor]:
    """Each gradient times `1 + w`, row by row, for every call of the head for the same samples.

    Half precision is multiplied in the precision of the weights and rounded once: `1 + w` in
    bfloat16 would lose an extra weight of 0.003.
    """
    first = gradients[0]
    if len(gradients) == 1 and first.dim() == 2 and first.dtype == extra_weights.dtype:
        return [first * (extra_weights + 1).unsqueeze(1)]  # the usual case, in few operations
    weighted = []
    for each in gradients:
        leading = each.shape[:-1] if per == "token" else each.shape[:1]
        shape = (*leading, *(1,) * (each.dim() - len(leading))) if each.dim() > 1 else (1,)
        weights = (extra_weights + 1).view(shape)
        if each.dtype == weights.dtype:
            weighted.append(each * weights)
        elif each.requires_grad and torch.is_grad_enabled():  # `out=` has no gradient
            weighted.append((each * weights).to(each.dtype))
        else:
            weighted.append(torch.mul(each, weights, out=torch.empty_like(each)))
    return weighted
