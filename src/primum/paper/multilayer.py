"""Several last blocks instead of the last layer, by explicit gradients (paper, Alg. 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from primum.kernel.optimizers.predict import check_supported, group_of, predict, shares
from primum.kernel.problem import Solution
from primum.paper.literal import Paper, PaperSettings


def split(model: nn.Sequential, blocks: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Split a model into a backbone and its last `blocks` children, which share its parameters."""
    if not 1 <= blocks <= len(model):
        raise ValueError(f"blocks must be between 1 and {len(model)}, got {blocks}")
    layers = list(model)
    return nn.Sequential(*layers[:-blocks]), nn.Sequential(*layers[-blocks:])


class MultiLayer:
    """Reweights samples by the interference that a step causes in all of `tail`.

    Replaces `loss.backward()`; the optimizer then steps as usual:

        hidden = backbone(inputs)
        loss = reducer.backward(hidden, targets)
        optimizer.step()

    Memory grows with the batch size times the parameters of `tail`; like the paper, we therefore
    recommend the last layer alone (`attach`). `backward` passes `hidden` through `tail` sample by
    sample, with new dropout masks.

    Args:
        tail: The last blocks. They must not mix samples: no BatchNorm in training mode.
        optimizer: Holds the parameters of `tail`; any class that `attach` accepts.
        loss: Per-sample or mean loss of `(outputs, targets)`; called with one sample.
        settings: Settings of the paper's recipe.
        chunk_size: Number of samples whose gradients are computed at a time.
    """

    def __init__(
        self,
        tail: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        settings: PaperSettings | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.tail = tail
        self.optimizer = optimizer
        self.loss = loss
        self.recipe = Paper(settings)
        self.chunk_size = chunk_size
        self.last: Solution | None = None
        _refuse_mixing(tail)
        for name, param in self._trained().items():
            check_supported(optimizer, param, name)

    def state_dict(self) -> dict[str, Any]:
        """The guards' moving averages."""
        return self.recipe.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recipe.load_state_dict(state)

    def backward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Fill `.grad` of the tail and, through `hidden`, of the backbone. Returns the mean loss.

        DEPARTS: line 8 of the paper's algorithm sums the gradient at `hidden` over the batch; the
        backbone's backward pass needs its rows, weighted.
        """
        _refuse_mixing(self.tail)
        trained = self._trained()
        gradients, of_hidden, losses = self._per_sample(trained, hidden.detach(), targets)
        solution = self.last = self._solve(trained, gradients)
        weights = 1 + solution.extra_weights
        with torch.no_grad():
            for name, param in trained.items():
                total = torch.einsum("b...,b->...", gradients[name], weights).to(param.dtype)
                param.grad = total if param.grad is None else param.grad + total
        if hidden.requires_grad:
            rows = weights.view(-1, *(1,) * (of_hidden.dim() - 1))
            torch.autograd.backward(hidden, of_hidden * rows.to(of_hidden.dtype))
        return losses.sum()

    def _trained(self) -> dict[str, nn.Parameter]:
        trained = {name: p for name, p in self.tail.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the tail has no trained parameters; use more blocks")
        return trained

    def _per_sample(
        self, trained: dict[str, nn.Parameter], hidden: Tensor, targets: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Per-sample gradients by parameter and at `hidden`, and the losses, all of `L_i / B`."""
        batch, wide = len(hidden), torch.promote_types(hidden.dtype, torch.float32)

        def sample_loss(params: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(self.tail, params, (row.unsqueeze(0),))
            return self.loss(outputs, target.unsqueeze(0)).sum() / batch

        of_samples = vmap(
            grad_and_value(sample_loss, argnums=(0, 1)),
            in_dims=(None, 0, 0),
            randomness="different",
            chunk_size=self.chunk_size,
        )
        params = {name: param.detach() for name, param in trained.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the only backend that vmap can batch
            (of_params, of_hidden), losses = of_samples(params, hidden, targets)
        return {name: rows.to(wide) for name, rows in of_params.items()}, of_hidden, losses

    def _solve(self, trained: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> Solution:
        """Solve with Q1, Q2 and q summed over the parameters (the paper's layer-wise form)."""
        updates = {}
        for name, param in trained.items():
            total = gradients[name].sum(0)
            total = total if param.grad is None else total + param.grad
            updates[name] = predict(self.optimizer, param, total)
        fractions = dict(zip(updates, shares(*(u.lr for u in updates.values())), strict=True))
        first = next(iter(trained))
        batch, zeros = len(gradients[first]), gradients[first].new_zeros
        gram, metric = zeros(batch, batch), zeros(batch, batch)
        drift, step_squared, uniform = zeros(batch), zeros(()), True
        for name, param in trained.items():
            rows, fraction = gradients[name].reshape(batch, -1), fractions[name]
            if group_of(self.optimizer, param).get("maximize", False):
                rows = -rows  # harm then means a lower objective
            step, gain = updates[name].step * fraction, updates[name].gain * fraction
            uniform = uniform and isinstance(gain, float) and gain == 1.0
            weighted = rows * (gain * torch.ones_like(step)).flatten()
            gram += weighted @ rows.t()
            metric += weighted @ weighted.t()
            drift += rows @ step.flatten()
            step_squared += step.square().sum()
        lr = updates[first].lr / fractions[first]
        return self.recipe.solve(gram, gram if uniform else metric, drift, step_squared, lr)


def _refuse_mixing(tail: nn.Module) -> None:
    for name, module in tail.named_modules():
        if isinstance(module, _BatchNorm) and (
            module.training or getattr(module, "running_mean", None) is None
        ):
            raise ValueError(
                f"{name or 'the tail'} ({type(module).__name__}) mixes the samples of a batch, so "
                "there are no per-sample gradients; use GroupNorm, or call .eval() on it to use "
                "its running statistics"
            )
