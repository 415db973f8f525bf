"""A second look at the same batch: the head's problem, solved again after a trial step.

The first solve treats the head's features as fixed, although the same step moves the backbone. The
second look takes the step with the first weights on copies, passes the batch through the moved
backbone and the old head, and corrects the drift of each sample by what has changed:

    drift_2[i] = drift[i] + (moved gradient of i - gradient of i) . head's trial step
                          + change of loss i by the backbone's trial step   (`second_look=network`)

per unit of lr. So `head` measures which samples the head's step harms once the backbone has moved,
and `network` which ones the whole step harms. The corrected drift is right for the trial step; the
effect of other weights is approximated by the head's Gram matrix. The real step starts from the old
parameters, with their gradient and the second weights. If the backbone does not move, both problems
are the same.

A step takes two forward and two backward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from primum import StepReport
from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError
from primum.experiments.methods import Method, autocast
from primum.experiments.weightings import Kept
from primum.kernel.head import registered as parameter


class SecondLook(Method):
    """primum's weights, from a problem whose drift is corrected after a trial step.

    Attributes:
        first_weights: Extra weights from the first solve. [B].
        weights: Extra weights that were applied. [B].
    """

    def attach(self) -> None:
        refused = {
            "fp16; choose --precision bf16 or fp32": self.scaler is not None,
            "clipping; leave out --clip": self.settings.clip is not None,
        }
        for what, given in refused.items():
            if given:
                raise UserError(f"second_look does not work with {what}")
        super().attach()
        self._report: StepReport | None = None

    @property
    def last(self) -> StepReport | None:
        """Report of the last step, with drift and weights of the second problem."""
        return self._report

    def backward(self, batch: Batch, step: int, steps: int, *, observed: bool) -> Tensor:
        assert self.reducer is not None
        assert self.reducer.head is not None
        assert isinstance(self.recipe, Kept)
        random = _random_state(batch.inputs.device)
        losses, features, output = self._pass(self.model, self.reducer.head, batch)
        self.set_recipe(losses, len(batch.ids), step, steps)
        loss = losses.mean()
        params = [param for param in self.model.parameters() if param.requires_grad]
        # The hook ignores this pass, as it computes no gradients of the head's parameters.
        (arrived,) = torch.autograd.grad(loss, output, retain_graph=True)
        weighted = torch.autograd.grad(loss, params, retain_graph=True)
        first = self.reducer.last
        assert first is not None
        self._report, self.first_weights = first, first.extra_weights
        if self.recipe.problem is not None and first.applied and float(self.recipe.lr) > 0:
            with _random_numbers(batch.inputs.device, random):  # the same dropout masks
                moved, trial = self._moved(weighted, batch)
            change = _along(*moved[1:], *trial) - _along(features, arrived, *trial)
            if self.arm.second_look == "network":
                change = change + (moved[0] - losses.detach()) / len(losses)
            drift = first.drift + change / float(self.recipe.lr)
            self._report = replace(first, drift=drift, solution=self.recipe.again(drift))
        self.weights = self._report.extra_weights
        with self.reducer.paused():
            ((1 + self.weights).to(losses.dtype) * losses).mean().backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _moved(
        self, gradients: tuple[Tensor, ...], batch: Batch
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        """The batch with the moved backbone and the old head, and the head's trial step.

        Losses [B], features [B, d] and gradients at the head's output [B, d_out]; steps of weight
        [d_out, d] and bias [d_out]. Computed on copies: BatchNorm statistics and optimizer state do
        not change.
        """
        assert self.reducer is not None
        twin, optimizer = copy.deepcopy((self.model, self.optimizer))
        params = [param for param in twin.parameters() if param.requires_grad]
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        old = self.reducer.head
        head = twin.get_submodule(self.reducer.head_name)
        assert old is not None
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            has_bias = parameter(old, "bias") is not None
            trial = head.weight - old.weight, head.bias - old.bias if has_bias else None
        head.load_state_dict(old.state_dict())
        losses, features, output = self._pass(twin, head, batch)
        (arrived,) = torch.autograd.grad(losses.mean(), output)
        return (losses.detach(), features, arrived), trial

    def _pass(
        self, model: nn.Module, head: nn.Linear, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [B], the head's input [B, d] and its output [B, d_out]."""
        with _seen(head) as calls, autocast(self.settings):
            logits = model(batch.inputs)
        ((features, output),) = calls
        return self.losses(logits, batch.targets), features.detach(), output


def _along(features: Tensor, gradients: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """First-order change of each sample's share of the loss along a step of the head. [B]."""
    moved = nn.functional.linear(features.to(weight.dtype), weight, bias)
    return (moved * gradients).sum(1)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Random state of the host and, if it is a GPU, of the device."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


@contextmanager
def _random_numbers(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Draw random numbers from this state in a block, and restore the current one afterwards."""
    with torch.random.fork_rng([device] if state[1] is not None else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield


@contextmanager
def _seen(head: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the head's inputs and outputs."""
    calls: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append((args[0], output))

    handle = head.register_forward_hook(note)
    try:
        yield calls
    finally:
        handle.remove()
