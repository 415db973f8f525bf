"""Interference of the whole network: Gram matrices and drift, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from primum.diagnostics.gradients import gradient_rows, sample_losses
from primum.diagnostics.layers import Layer, in_turns, layers_of
from primum.diagnostics.probe import Probe
from primum.positions import RADIUS
from primum.problem import Problem
from primum.update import predict


@dataclass(frozen=True, eq=False)
class Interference:
    """What a step is about to do to each sample, to first order and by layer.

    As in the core, G has the gradients of `L_i / B`, and everything is per unit of the largest
    learning rate: sample i's own loss changes by about `B * lr * drift[i]`.

    Attributes:
        layers: Names, from the first layer to run to the last.
        gram: `G_l diag(gain_l) G_l'`: how much weight on one sample lowers the loss of another.
            [layers, B, B].
        drift: `G_l @ step_l`: the plain step's effect; positive means harmed. [layers, B].
        step_squared: `sum(step_l^2 / gain_l)`, in the optimizer's own metric. [layers].
        losses: Before the step. [B].
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
        """The convex problem of layers `first` to the last: 0 for the whole network, -1 the head.

        The same as `attach` solves for the head, with sums over the layers.
        """
        reach = radius * self.step_squared[first:].sum().sqrt()
        return Problem.dense(
            self.gram[first:].sum(0), self.drift[first:].sum(0), reach, max_extra_weight
        )

    def drift_after(self, extra_weights: Tensor) -> Tensor:
        """Drift of the whole network with extra weights, the gain held fixed. [..., B].

        Exact for SGD. AdamW's gain changes a little with the gradient: see `first_order`.
        """
        return self.drift.sum(0) - extra_weights @ self.gram.sum(0)


def measure(probe: Probe) -> Interference:
    """Layer-wise Gram matrices and drift of the step that the optimizer is about to take."""
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
    """What the optimizer's true step does with given weights, and the gradient that makes it.

    Shapes: drift [B]; gradients, by parameter name, in the shape of the parameter.
    """

    drift: Tensor
    gradients: dict[str, Tensor]


def first_order(probe: Probe, extra_weights: Mapping[str, Tensor]) -> dict[str, FirstOrder]:
    """Drift of the whole network under the optimizer's true step, for each of several weightings.

    Here the step is predicted again from each weighted gradient, second moments and all. "plain" is
    always among the results. Shapes: extra_weights name -> [B].
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
    """The layer's number, the parameter's name, its rows of G (free to be written). [B, size]."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    for turn in in_turns(probe, layers):
        params = {n: probe.moved[n][0].detach() for layer in turn for n in layer.params}
        rows = gradient_rows(probe, params)
        for layer in turn:
            for name in layer.params:
                yield numbers[layer], name, rows.pop(name)
