"""Interference in the whole network: Gram matrices and drift, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from primum.diagnostics.gradients import gradient_rows, sample_losses
from primum.diagnostics.layers import Layer, in_turns, layers_of
from primum.diagnostics.probe import Probe
from primum.kernel.optimizers.predict import predict
from primum.kernel.problem import Problem
from primum.kernel.recipe import RADIUS


@dataclass(frozen=True, eq=False)
class Interference:
    """First-order effect of the next step on each sample, by layer.

    As in the core, G holds the gradients of `L_i / B`, and everything is per unit of the largest
    learning rate: the loss of sample i changes by about `B * lr * drift[i]`.

    Attributes:
        layers: Layer names in execution order.
        gram: `G_l diag(gain_l) G_l'`: how much weight on one sample lowers the loss of another.
            [layers, B, B].
        drift: `G_l @ step_l`: effect of the plain step; positive means harmed. [layers, B].
        step_squared: `sum(step_l^2 / gain_l)`, in the optimizer's own metric. [layers].
        losses: Losses before the step. [B].
        lr: The largest learning rate.
    """

    layers: tuple[str, ...]
    gram: Tensor
    drift: Tensor
    step_squared: Tensor
    losses: Tensor
    lr: Tensor | float

    def problem(
        self, first: int = 0, *, radius: float = RADIUS["sample"], max_extra_weight: float = 2.0
    ) -> Problem:
        """The convex problem for layers `first` to the last; 0: whole network, -1: last layer.

        The problem that `attach` solves for the head, with all terms summed over these layers.
        """
        reach = radius * self.step_squared[first:].sum().sqrt()
        return Problem.dense(
            self.gram[first:].sum(0), self.drift[first:].sum(0), reach, max_extra_weight
        )

    def drift_after(self, extra_weights: Tensor) -> Tensor:
        """Drift of the whole network with extra weights, at a fixed gain. [..., B].

        Exact for SGD. AdamW's gain depends slightly on the gradient: see `first_order`.
        """
        return self.drift.sum(0) - extra_weights @ self.gram.sum(0)


def measure(probe: Probe) -> Interference:
    """Gram matrices and drift of the optimizer's next step, by layer."""
    layers, (fractions, lr) = layers_of(probe), probe.shares()
    batch, one = probe.batch_size, torch.ones((), dtype=probe.dtype, device=probe.device)
    gram = one.new_zeros(len(layers), batch, batch)
    drift = one.new_zeros(len(layers), batch)
    step_squared = one.new_zeros(len(layers))
    for number, name, rows in _by_parameter(probe, layers):
        param, optimizer = probe.moved[name]
        total = (probe.sign * rows.sum(0)).view_as(param)
        update = predict(optimizer, param, total)
        step = (update.step * fractions[name]).flatten()
        gain = (update.gain * fractions[name] * torch.ones_like(update.step)).flatten()
        drift[number] += rows @ step
        step_squared[number] += (step.square() / gain).sum()
        rows *= gain.sqrt()
        gram[number] += rows @ rows.t()
    names = tuple(layer.name for layer in layers)
    return Interference(names, gram, drift, step_squared, sample_losses(probe), lr)


@dataclass(frozen=True, eq=False)
class FirstOrder:
    """Drift under the optimizer's true step with given weights, and the weighted gradients.

    Shapes: drift [B]; gradients, by parameter name, as the parameter.
    """

    drift: Tensor
    gradients: dict[str, Tensor]


def first_order(probe: Probe, extra_weights: Mapping[str, Tensor]) -> dict[str, FirstOrder]:
    """Drift of the whole network under the optimizer's true step, for several weightings.

    The step is predicted from each weighted gradient, including its effect on second moments. The
    result always has an entry "plain". Shapes: extra_weights name -> [B].
    """
    fractions, _ = probe.shares()
    zero = torch.zeros(probe.batch_size, dtype=probe.dtype, device=probe.device)
    weights = {"plain": 1 + zero} | {key: 1 + w.to(zero) for key, w in extra_weights.items()}
    drifts = {key: zero.clone() for key in weights}
    gradients: dict[str, dict[str, Tensor]] = {key: {} for key in weights}
    for _, name, rows in _by_parameter(probe, layers_of(probe)):
        param, optimizer = probe.moved[name]
        for key, weight in weights.items():
            gradient = (probe.sign * (weight @ rows)).view_as(param)
            step = predict(optimizer, param, gradient).step * fractions[name]
            drifts[key] += rows @ step.flatten()
            gradients[key][name] = gradient
    return {key: FirstOrder(drifts[key], gradients[key]) for key in weights}


def _by_parameter(probe: Probe, layers: list[Layer]) -> Iterator[tuple[int, str, Tensor]]:
    """Yields layer number, parameter name and its rows of G, which may be modified. [B, size]."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    for turn in in_turns(probe, layers):
        params = {n: probe.moved[n][0].detach() for layer in turn for n in layer.params}
        rows = gradient_rows(probe, params)
        for layer in turn:
            for name in layer.params:
                yield numbers[layer], name, rows.pop(name)
