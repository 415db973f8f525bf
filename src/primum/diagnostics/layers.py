"""The layers of a model in execution order, with their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from primum.diagnostics.gradients import loss_of_one, over_chunks
from primum.diagnostics.probe import Probe


@dataclass(frozen=True)
class Layer:
    """A module and its own parameters (weight and bias together), by name."""

    name: str
    params: tuple[str, ...]


def layers_of(probe: Probe) -> list[Layer]:
    """Layers that the step changes, in execution order.

    A layer is a module with parameters of its own; a parametrized one (weight norm) is one layer.
    A shared parameter belongs to the last layer that holds it.
    """
    names = {id(param): name for name, (param, _) in probe.moved.items()}
    owners = _in_running_order(probe)
    holder: dict[str, str] = {}
    for owner in owners:
        for param in probe.model.get_submodule(owner).parameters(recurse=False):
            if id(param) in names:
                holder[names[id(param)]] = owner
    found: dict[str, list[str]] = {}
    for owner in owners:
        mine = [name for name, held in holder.items() if held == owner]
        if mine:
            label = owner.split(".parametrizations.")[0] or type(probe.model).__name__
            found.setdefault(label, []).extend(mine)
    return [Layer(name, tuple(params)) for name, params in found.items()]


def _in_running_order(probe: Probe) -> list[str]:
    """Module names in the order of first calls; a module that is never called follows its parent.

    `nn.MultiheadAttention`, for example, uses the weight of its last layer without calling it.
    """
    modules = dict(probe.model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    called: dict[str, int] = {}

    def note(module: nn.Module, args: Any) -> None:
        called.setdefault(names[id(module)], len(called))

    handles = [module.register_forward_pre_hook(note) for module in modules.values()]
    try:
        next(over_chunks(probe, partial(loss_of_one, probe, {})))
    finally:
        for handle in handles:
            handle.remove()

    def place(name: str) -> int:
        while name not in called:
            name = name.rpartition(".")[0]
        return called[name]

    return sorted(modules, key=place)  # stable: ties keep the order of definition


def in_turns(probe: Probe, layers: list[Layer]) -> Iterator[list[Layer]]:
    """Groups of consecutive layers whose per-sample gradients fit into `probe.max_bytes`."""
    turn: list[Layer] = []
    used = 0
    for layer in layers:
        entries = sum(probe.moved[name][0].numel() for name in layer.params) * probe.batch_size
        size = entries * probe.dtype.itemsize
        if turn and used + size > probe.max_bytes:
            yield turn
            turn, used = [], 0
        turn.append(layer)
        used += size
    yield turn
