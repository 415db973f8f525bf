"""Several last blocks instead of the last layer: explicit per-sample gradients (paper, Alg. 8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer

from primum.paper.recipe import Paper, PaperSettings
from primum.problem import Solution
from primum.update import predict, shares


def split(model: nn.Sequential, blocks: int) -> tuple[nn.Sequential, nn.Sequential]:
    """The model as a backbone and its last `blocks` children. Both share its parameters."""
    if not 1 <= blocks <= len(model):
        raise ValueError(f"blocks must be between 1 and {len(model)}, got {blocks}")
    children = list(model.children())
    return nn.Sequential(*children[:-blocks]), nn.Sequential(*children[-blocks:])


class MultiLayer:
    """Weighs samples by the interference that a step causes in the whole of `tail`.

    Stands where `loss.backward()` stood; the optimizer then steps as always:

        hidden = backbone(inputs)
        loss = reducer.backward(hidden, targets)
        optimizer.step()

    Memory grows with the batch times the parameters of `tail`, which is why the paper, and we,
    advise the last layer alone (`attach`).

    Args:
        tail: The last blocks. Every sample must be processed by itself: no BatchNorm in training.
        optimizer: Holds the parameters of `tail`; any class that `attach` takes.
        loss: Per-sample or mean loss of `(outputs, targets)`; it is called with one sample.
        settings: Of the paper's recipe.
        chunk_size: Samples whose gradients are computed at a time.
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

    def backward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Fill `.grad` of the tail and, through `hidden`, of the backbone. Returns the mean loss.

        DEPARTS: line 8 of the paper's algorithm sums the gradient at `hidden` over the batch; what
        the backbone's backward pass needs is that gradient with its rows weighted.
        """
        _refuse_mixing(self.tail)
        names = [name for name, p in self.tail.named_parameters() if p.requires_grad]
        params = dict(self.tail.named_parameters())
        gradients, of_hidden, losses = self._per_sample(params, names, hidden.detach(), targets)
        solution = self._solve([params[name] for name in names], gradients)
        self.last = solution
        weights = 1 + solution.extra_weights
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                total = torch.einsum("b...,b->...", gradient, weights.to(gradient.dtype))
                param = params[name]
                param.grad = total if param.grad is None else param.grad + total
        if hidden.requires_grad:
            rows = weights.to(of_hidden.dtype).view(-1, *(1,) * (of_hidden.dim() - 1))
            torch.autograd.backward(hidden, of_hidden * rows)
        return losses.sum()

    def _per_sample(
        self, params: dict[str, nn.Parameter], names: list[str], hidden: Tensor, targets: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """G by parameter, the gradient at `hidden`, and the losses, all of `L_i / B`."""
        fixed = {k: p.detach() for k, p in params.items() if k not in names}
        fixed |= dict(self.tail.named_buffers())
        batch = len(hidden)

        def sample_loss(trained: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(self.tail, fixed | trained, (row.unsqueeze(0),))
            return self.loss(outputs, target.unsqueeze(0)).sum() / batch

        of_samples = vmap(
            grad_and_value(sample_loss, argnums=(0, 1)),
            in_dims=(None, 0, 0),
            randomness="different",
            chunk_size=self.chunk_size,
        )
        trained = {name: params[name].detach() for name in names}
        (of_params, of_hidden), losses = of_samples(trained, hidden, targets)
        return [of_params[name] for name in names], of_hidden, losses

    def _solve(self, params: list[nn.Parameter], gradients: list[Tensor]) -> Solution:
        """Q1, Q2 and q summed over the parameters (the paper's layer-wise decomposition)."""
        updates = []
        for param, gradient in zip(params, gradients, strict=True):
            total = gradient.sum(0)
            total = total if param.grad is None else total + param.grad
            updates.append(predict(self.optimizer, param, total))
        batch = len(gradients[0])
        gram = gradients[0].new_zeros(batch, batch)
        metric, drift = torch.zeros_like(gram), gradients[0].new_zeros(batch)
        step_squared = gradients[0].new_zeros(())
        fractions = shares(*(update.lr for update in updates))
        for update, gradient, fraction in zip(updates, gradients, fractions, strict=True):
            rows, step = gradient.flatten(1), (update.step * fraction).flatten()
            gain = (update.gain * fraction * torch.ones_like(update.step)).flatten()
            gram += (rows * gain) @ rows.t()
            metric += (rows * gain.square()) @ rows.t()
            drift += rows @ step
            step_squared += step.square().sum()
        return self.recipe.solve(gram, metric, drift, step_squared, updates[0].lr / fractions[0])


def _refuse_mixing(tail: nn.Module) -> None:
    for name, module in tail.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name or 'the tail'} ({type(module).__name__}) mixes the samples of a batch in "
                "training mode, so there are no per-sample gradients; use GroupNorm, or .eval()"
            )
