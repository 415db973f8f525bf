"""1 - The head's input and the gradient that arrives at its output, from the user's own loop."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from primum.compat import (
    eager,
    executes,
    executes_in_graph,
    exporting,
    inside_functorch,
    is_sharded,
    parameter,
)
from primum.hook import Hook

_NUMBERS = itertools.count()

NEAR = 6  # Nodes between the head's output and its weight: views, casts, the transpose.


class Pass:
    """One forward call of the head, waiting for its gradient.

    Belongs to the graph (a hook and the metadata of the output's node refer to it) and dies with
    it: a forward pass without a backward pass leaves nothing behind. Holds the head's input until
    the gradient arrives and only a weak reference after that: the graph may live until the next
    forward, the input need not.
    """

    def __init__(self, key: object, head: nn.Linear, features: Tensor, output: Tensor) -> None:
        self.training = head.training
        self.weight = parameter(head, "weight")
        self.extra_weights: Tensor | None = None
        self.weighed = False  # the explicit form has put the weights into the loss already
        self.together = False  # with other ranks
        self.differentiated = False  # under create_graph=True a second gradient may arrive
        self.ranks: Any = None  # with which this pass is weighed
        self._strong: Tensor | None = features
        self._weak = weakref.ref(features)
        self._output_nr = output.output_nr
        node = output.grad_fn
        assert node is not None
        self.accumulator = None if self.weight is None else _accumulator(node, self.weight)
        _notes(node)[key] = self

    def features(self) -> Tensor:
        """The head's input."""
        features = self._strong if self._strong is not None else self._weak()
        if features is None:
            raise RuntimeError("the head's input was freed by an earlier pass through this graph")
        return features

    def release(self) -> None:
        self._strong = None

    def trains_head(self) -> bool:
        """Whether the backward pass under way will add to the gradient of the head's weight.

        `torch.autograd.grad` for another purpose passes through as well: with respect to the input
        for an adversarial example or a gradient penalty, or to the output in the explicit form.
        """
        return self.accumulator is None or executes(self.accumulator)

    @staticmethod
    def of(node: Node, key: object) -> Pass | None:
        """The call of the head whose output this node makes, if it does."""
        made: Pass | None = _notes(node).get(key)
        return made

    @staticmethod
    def behind(losses: Tensor, key: object) -> dict[Pass, GradientEdge]:
        """The calls of the head that losses depend on, the nearest first, and where they are."""
        found: dict[Pass, GradientEdge] = {}
        for node in nodes_behind(losses, key):
            made = Pass.of(node, key)
            if made is not None:
                found[made] = GradientEdge(node, made._output_nr)
        return found


def nodes_behind(losses: Tensor, key: object) -> Iterator[Node]:
    """The nodes that losses depend on, the nearest first, and none behind a call of the head."""
    seen: set[Node | None] = {None}
    waiting = deque([losses.grad_fn])
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if Pass.of(node, key) is None:
            waiting.extend(below for below, _ in node.next_functions)


def _notes(node: Node) -> dict[object, Any]:
    notes: Any = node.metadata  # a property, whatever the stubs say
    return notes  # type: ignore[no-any-return]


def _accumulator(node: Node, weight: Tensor) -> Node | None:
    """The node near `node` that adds to `weight.grad`; None if there is none, as when frozen."""
    level = {node: None}
    for _ in range(NEAR):
        for each in level:
            if getattr(each, "variable", None) is weight:
                return each
        level = {below: None for each in level for below, _ in each.next_functions if below}
    return None


# --- from what was captured to samples ------------------------------------------------------------


def samples(tensors: Sequence[Tensor], per: str) -> Tensor:
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


def rows_of(gradient: Tensor, per: str) -> int:
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


# --- hooks ----------------------------------------------------------------------------------------


class Owner(Protocol):
    """What a `Listener` reports to: the Reducer."""

    def on_forward(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        """The head ran in eager mode."""

    def on_compiled(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool
    ) -> Tensor | None:
        """A gradient arrived in a compiled graph, to be replaced by the one returned."""


# A graph that torch.compile makes can name a listener by number alone.
LISTENERS: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()

# For operations that run Python each time, which a CUDA graph (mode="reduce-overhead") would
# record once and repeat. torch 2.8 has no such tag.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
UNRECORDED: Any = {} if _TAG is None else {"tags": (_TAG,)}


@torch.library.custom_op(
    "primum::arrive",
    mutates_args=(),
    schema="(Tensor gradient, Tensor features, int number, bool training) -> Tensor",
    **UNRECORDED,
)
def arrive(gradient: Tensor, features: Tensor, number: int, training: bool) -> Tensor:
    """In a compiled backward pass: the gradient to hand on, in new memory."""
    listener = LISTENERS.get(number)
    weighted = None if listener is None else listener.arrived(gradient, features, training)
    return gradient.clone() if weighted is None else weighted


@arrive.register_fake
def _(gradient: Tensor, features: Tensor, number: int, training: bool) -> Tensor:
    return torch.empty_like(gradient)


class Carry(torch.autograd.Function):
    """The identity at the head's output, whose backward is an operation that compilers keep."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, features: Tensor, number: int, training: bool) -> Tensor:
        ctx.save_for_backward(features)
        ctx.number, ctx.training = number, training
        return output.clone()  # a view may not be changed in place; inductor leaves the copy out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (features,) = ctx.saved_tensors
        return arrive(gradient, features, ctx.number, ctx.training), None, None, None


class Listener:
    """A forward hook on the head that reports to the Reducer.

    An eager call of the head goes to `owner.on_forward`. In a graph made by torch.compile there is
    no such moment: the output goes through `Carry`, and `owner.on_compiled` gives the gradient in
    the backward pass. No graph break either way. The head owns this, and this owns the Reducer.
    """

    def __init__(self, head: nn.Linear, owner: Owner) -> None:
        self.owner: Owner | None = owner
        self._head = weakref.ref(head)
        self.compiled = False  # whether a compiled graph has run the head
        self.number = next(_NUMBERS)
        LISTENERS[self.number] = self
        self._handle = Hook(head, self)

    def __call__(
        self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        # What comes before a call of `_forward` is traced by torch.compile.
        if not isinstance(output, Tensor) or not output.requires_grad or exporting():
            return None
        given = (*args, *kwargs.values())  # a subclass may name its input as it likes
        if not given or not isinstance(given[0], Tensor):
            return None
        features = given[0]
        if torch.compiler.is_dynamo_compiling():
            self.compiled = True
            carried: Tensor = Carry.apply(  # type: ignore[no-untyped-call]
                output, features, self.number, head.training
            )
            return carried
        self._forward(head, features, output)
        return None

    @eager
    def _forward(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        if self.owner is not None and not inside_functorch():
            self.owner.on_forward(head, features, output)

    def arrived(self, gradient: Tensor, features: Tensor, training: bool) -> Tensor | None:
        """The gradient to hand on in a compiled graph; None for the one that arrived."""
        weight = parameter(self._head(), "weight")
        if self.owner is None or weight is None or not weight.requires_grad:
            return None
        if not is_sharded(weight) and not executes_in_graph(weight):
            return None  # a gradient for another purpose
        return self.owner.on_compiled(gradient, lambda: features, training)

    def remove(self) -> None:
        self._handle.remove()
        self.owner = None  # a compiled graph may go on calling
