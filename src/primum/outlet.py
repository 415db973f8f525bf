"""Weights at the model's output for interference that is measured in an earlier layer.

When the gradient arrives at the output, a second, short backward pass carries it on to the layer
that is measured, and no further: no parameter's gradient is computed, nothing is accumulated, and
the graph stays for the pass that is under way. The weights found there multiply the gradient at the
output, so every trained parameter receives them, above the layer and beside it.

In front of a frozen head nothing is trained above its input, so the gradient is taken there: no
operation of the size of the vocabulary is repeated. Only the head's share of it: a value head or
another loss on the same features keeps its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from primum.capture import Pass, mark, nodes_behind, reweight, rows_of
from primum.compat import (
    batch_norm,
    current_node,
    eager,
    exporting,
    inside_functorch,
    version,
)
from primum.fallback import Plain
from primum.hook import Hook
from primum.ranks import Ranks

MOST_NODES = 100  # Of a frozen head, in which its input is looked for.


class Owner(Protocol):
    """What an `Outlet` reports to: the Reducer."""

    def on_output(
        self, gradient: Tensor, output: int | GradientEdge, ranks: Ranks | None
    ) -> Tensor | None:
        """A gradient arrived at an edge, or at output number `output` of the node that runs now."""

    def _ranks(self, *, eager: bool) -> Ranks | None: ...


class Outlet:
    """A forward hook on the module whose output is weighed.

    The module owns it; it has a weak reference to the Reducer.

    Args:
        module: The module.
        owner: The Reducer.
        name: The module's name, for messages.
        model: What it is a part of.

    Attributes:
        marked: Whether the module has run in eager mode, for the `OutputCheck`.
    """

    def __init__(self, module: nn.Module, owner: Owner, name: str, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._norms = weakref.WeakSet(each for each in model.modules() if batch_norm(each))
        self._name = name
        self.marked = False
        self._calls: list[weakref.ref[Pass]] = []  # of the layer, as far as their graphs live
        self._busy = False
        self._spreads: Sequence[bool] | None = None  # over samples, over positions; to others
        self._hook = Hook(module, self)

    @property
    def owner(self) -> Owner | None:
        return self._owner()

    def remove(self) -> None:
        self._hook.remove()
        self._calls.clear()

    def called(self, made: Pass) -> None:
        """The layer that is measured ran."""
        self._calls = [each for each in self._calls if each() is not None]
        self._calls.append(weakref.ref(made))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # In a compiled graph there is no way back to the layer: what comes after is not traced.
        if torch.compiler.is_dynamo_compiling() or exporting():
            return
        self._forward(module, (*args, *kwargs.values()), output)

    @eager
    def _forward(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        owner = self._owner()
        if owner is None or inside_functorch():
            return
        frozen = not any(each.requires_grad for each in module.parameters())
        tensor = given[0] if frozen and given else output
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None or tensor.dim() == 0:
            return
        mark(tensor.grad_fn, self)
        self.marked = True
        ranks = owner._ranks(eager=True)
        uses = [] if tensor is output else self._uses(output, tensor)
        if len(uses) == 1:
            ((node, place),) = uses
            edge = GradientEdge(tensor.grad_fn, tensor.output_nr)
            node.register_hook(partial(self._share, place, edge, ranks))
        else:
            hook = partial(self._arrive, tensor.output_nr, ranks)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _uses(self, output: Any, tensor: Tensor) -> list[tuple[Node, int]]:
        """Where the graph of a module's output takes its input: nodes, and which of their inputs.

        The input's own node is marked, so the search ends there.
        """
        nodes = islice(nodes_behind(output, self), MOST_NODES) if isinstance(output, Tensor) else ()
        own = tensor.grad_fn, tensor.output_nr
        return [(n, i) for n in nodes for i, each in enumerate(n.next_functions) if each == own]

    @eager
    def _share(
        self, place: int, edge: GradientEdge, ranks: Ranks | None, gradients: Any, _: Any
    ) -> Any:
        """What a node hands on to its inputs, with the weighted one for the input at `place`."""
        gradient = gradients[place]
        weighted = None if gradient is None else self._arrive(edge, ranks, gradient)
        if weighted is None:
            return None
        return *gradients[:place], weighted, *gradients[place + 1 :]

    @eager
    def _arrive(
        self, output: int | GradientEdge, ranks: Ranks | None, gradient: Tensor
    ) -> Tensor | None:
        owner = self._owner()
        if owner is None or self._busy:  # the second pass starts at the same node
            return None
        return owner.on_output(gradient, output, ranks)

    # --- on the way back --------------------------------------------------------------------------

    def edge(self, output: int | GradientEdge) -> GradientEdge:
        """Where the gradient is that arrives now: at an output of the node that runs, if given."""
        if isinstance(output, GradientEdge):
            return output
        node = current_node()
        if node is None:
            raise Plain("this version of torch does not expose the current autograd node")
        return GradientEdge(node, output)

    def passes(self, edge: GradientEdge, key: object) -> dict[Pass, GradientEdge]:
        """The calls of the layer that lie behind the output; of a graph used before, as well."""
        alive = [made for made in (each() for each in self._calls) if made is not None]
        most = sum(made.awaits for made in alive) or len(alive)
        return Pass.behind(edge.node, key, most=most) if most else {}

    def carry(
        self, edge: GradientEdge, gradient: Tensor, calls: Sequence[GradientEdge]
    ) -> list[Tensor]:
        """The gradient at the output of each call of the layer: the second backward pass."""
        self._busy = True
        try:
            with self._uncounted():
                carried = torch.autograd.grad(
                    [edge], list(calls), [gradient.detach()], retain_graph=True
                )
        finally:
            self._busy = False
        return [each.detach() for each in carried]

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """A block in which batch norms keep their running statistics.

        With activation checkpointing the second backward pass runs a part of the forward pass
        again. After the first block only norms that ran again in it are looked after.
        """
        own = [(norm, *each) for norm in self._norms for each in norm.named_buffers(recurse=False)]
        try:
            for norm, name, buffer in own:
                setattr(norm, name, buffer.clone())
            yield
        finally:
            changed = (norm for norm, name, _ in own if version(getattr(norm, name)) > 0)
            self._norms = weakref.WeakSet(changed)
            for norm, name, buffer in own:
                setattr(norm, name, buffer)

    def mixes(
        self,
        edge: GradientEdge,
        gradient: Tensor,
        calls: Sequence[GradientEdge],
        warn: Callable[[str, str], None],
        per: str,
    ) -> bool:
        """Whether positions depend on each other after the layer; warns of samples that do.

        Known from the first pass that has samples and whose values are finite, by two more second
        passes: with a gradient at the last position of one sample alone, the last or the first. The
        last position of the last sample has its place in time-first order as well.
        """
        if self._spreads is None and gradient.numel() > 0:
            last, first = (spreads(self.carry(edge, alone(gradient, i), calls), i) for i in (-1, 0))
            if last and first:
                self._spreads = [one or other for one, other in zip(last, first, strict=True)]
        samples, positions, moved = self._spreads or (False, False, False)
        if moved:
            raise Plain(
                f"the {per}s of the measured layer are in another order than those of the output; "
                "pass head= a layer whose first dimension is the batch"
            )
        if samples:
            warn(
                "coupled",
                f"samples affect each other between the measured layer and {self._name!r} (batch "
                "norm, attention over the batch, another batch dimension), so each sample's "
                "interference is only measured approximately",
            )
        return samples or positions


def alone(gradient: Tensor, sample: int) -> Tensor:
    """A gradient of that shape, zero but for the last position of one sample."""
    made = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    own = made[sample] if made.dim() < 3 else made[sample].view(-1, made.shape[-1])[-1]
    own.copy_(torch.arange(own.numel(), device=own.device).cos().view(own.shape))
    return made


def spreads(carried: Sequence[Tensor], sample: int) -> tuple[bool, bool, bool] | None:
    """Whether gradients reach others than a sample, several of its positions, and it not at all.

    Those of something that belongs to one position of that sample. None if not finite.
    """
    found = []
    for each in carried:
        rows = each.unsqueeze(0) if each.dim() == 1 else each.reshape(len(each), -1, each.shape[-1])
        own, reached = rows[sample].any(-1), rows.flatten(1).any(1)
        others = reached.sum() > own.any()
        found.append(torch.stack((others, own.sum() > 1, own.any(), ~rows.isfinite().all())))
    others, positions, itself, unknown = torch.stack(found).any(0).tolist()  # SYNC: once
    return None if unknown else (others, positions, others and not itself)


def weigh_rows(gradient: Tensor, extra_weights: Tensor, per: str) -> Tensor:
    """A gradient times `1 + w`, row by row: of the first dimension, or per token of all but one."""
    if gradient.dim() == 1:
        return reweight([gradient.unsqueeze(1)], extra_weights, "sample")[0].squeeze(1)
    return reweight([gradient], extra_weights, per)[0]


def check_rows(gradient: Tensor, carried: Sequence[Tensor], per: str) -> None:
    """Refuse a layer whose rows are not those of the output."""
    rows = len(gradient) if gradient.dim() == 1 else rows_of(gradient, per)
    for each in carried:
        if rows_of(each, per) != rows:
            raise Plain(
                f"the measured layer saw {rows_of(each, per)} {per}s, but the output has "
                f"{rows}; pass head= a layer whose first dimension is the batch"
            )
