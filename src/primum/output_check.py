"""Whether the layer that was found makes the model's output, seen in the first training pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from primum.capture import Carry, Pass
from primum.compat import exporting, inside_functorch
from primum.hook import Hook

MOST_NODES = 100_000
OPAQUE = ("Checkpoint", "Compiled")  # nodes that hide a part of the graph


class OutputCheck:
    """A hook on the model that checks one forward pass in training, then removes itself.

    Args:
        model: As passed to `attach`.
        key: A reference to the Reducer, whose `Pass` marks the head's output in the graph. If it
            has made none (the head was not called, is frozen, or runs in a compiled graph),
            nothing is said here; the `Monitor` notices what matters.
        name: The head's name.
        warn: Takes a message.
    """

    def __init__(
        self, model: nn.Module, key: Callable[[], Any], name: str, warn: Callable[[str], None]
    ) -> None:
        self._key, self._name, self._warn = key, name, warn
        self._hook = Hook(model, self, prepend=False)

    def remove(self) -> None:
        self._hook.remove()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or exporting() or inside_functorch():
            return
        if not model.training:
            return
        try:
            outputs = [each.grad_fn for each in _tensors(output) if each.grad_fn is not None]
            if not outputs:
                return
            self.remove()
            reducer = self._key()
            if reducer is not None and reducer.marked:
                self._look(outputs)
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            self.remove()
            self._warn(
                f"could not check whether {self._name!r} produces the model's output: {error!r}"
            )

    def _look(self, outputs: list[Node]) -> None:
        found = [_trace(node, self._key()) for node in outputs]
        if any(hidden for _, _, hidden in found) or (True, False, False) in found:
            return
        if any(reached for reached, _, _ in found):
            self._warn(
                f"the output of {self._name!r} is only part of the model's output: other "
                "parameters contribute to it too (a second head, a gate). Interference is only "
                "measured in that layer; pass head= the layer that produces the output, or call "
                "primum.detach(model)"
            )
        else:
            self._warn(
                f"the output of {self._name!r} does not reach the model's output, so its sample "
                "weights may be unrelated to the loss; pass head= the layer that produces the "
                "output, or call primum.detach(model)"
            )


def _trace(output: Node, key: object) -> tuple[bool, bool, bool]:
    """Whether an output depends on the head, on parameters beside it, on what cannot be seen."""
    reached = beside = hidden = False
    seen: set[Node] = set()
    waiting = [output]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        # In a graph that torch.compile made without a compiler, `Carry` marks the output.
        if Pass.of(node, key) is not None or node.name().startswith(Carry.__name__):
            reached = True
            continue
        beside = beside or hasattr(node, "variable")
        hidden = hidden or any(word in node.name() for word in OPAQUE)
        waiting.extend(below for below, _ in node.next_functions if below is not None)
    return reached, beside, hidden


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in an output: alone, in tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, list | tuple):
        output = list(getattr(output, "__dict__", {}).values())
    for each in output:
        if isinstance(each, Tensor | list | tuple | Mapping):
            yield from _tensors(each)
