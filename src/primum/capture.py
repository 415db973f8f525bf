"""1 - The head's input and the gradient that arrives at its output, from the user's own loop."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as eager  # torch.compiler.disable, imported lazily
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

OnPass: TypeAlias = Callable[[nn.Module, Tensor, Tensor], None]
OnArrival: TypeAlias = Callable[[Tensor, Callable[[], Tensor], bool], Tensor | None]

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
        self.weight = weight_of(head)
        self.extra_weights: Tensor | None = None
        self.weighed = False  # the explicit form has put the weights into the loss already
        self.ranks: Any = None  # with which this pass is weighed
        self._strong: Tensor | None = features
        self._weak = weakref.ref(features)
        self._output_nr = output.output_nr
        node = output.grad_fn
        assert node is not None
        self._accumulator = None if self.weight is None else _accumulator(node, self.weight)
        _notes(node)[key] = self

    def features(self) -> Tensor:
        """The head's input."""
        features = self._strong if self._strong is not None else self._weak()
        if features is None:
            raise RuntimeError("the head's input is gone: this graph was used before")
        return features

    def release(self) -> None:
        self._strong = None

    def trains_head(self) -> bool:
        """Whether the backward pass under way will add to the gradient of the head's weight.

        `torch.autograd.grad` for another purpose comes by as well: with respect to the input for
        an adversarial example or a gradient penalty, or to the output in the explicit form.
        """
        return self._accumulator is None or _executes(self._accumulator)

    @staticmethod
    def behind(losses: Tensor, key: object) -> dict[Pass, GradientEdge]:
        """The calls of the head that `losses` were computed from, and where in the graph."""
        found: dict[Pass, GradientEdge] = {}
        seen: set[Node | None] = {None}
        waiting = [losses.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            made: Pass | None = _notes(node).get(key)
            if made is not None:
                found[made] = GradientEdge(node, made._output_nr)
            else:
                waiting.extend(below for below, _ in node.next_functions)
        return found


def weight_of(head: nn.Linear) -> Tensor | None:
    """The weight as it is registered now: None once it is computed from others (weight norm)."""
    return head._parameters.get("weight")


def _executes(accumulator: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # `torch.autograd.grad` with respect to the weight itself
        return True


def _trains(weight: Tensor) -> bool:
    """Whether the backward pass under way will add to `weight.grad`, asked in a compiled graph.

    Custom operations run below autograd: up for a moment, to ask for the node that adds.
    """
    try:
        included = torch._C._dispatch_tls_local_include_set()
        nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        with torch._C._ForceDispatchKeyGuard(included, nothing), torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(weight).node
    except (AttributeError, RuntimeError):  # a torch without these: most passes are training
        return True
    return _executes(node)


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


# A graph that torch.compile makes can name a listener by number alone.
_LISTENERS: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()


@torch.library.custom_op("primum::arrive", mutates_args=())
def arrive(gradient: Tensor, features: Tensor, number: int, training: bool) -> Tensor:
    """In a compiled backward pass: the gradient to hand on, in new memory."""
    listener = _LISTENERS.get(number)
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
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (features,) = ctx.saved_tensors
        return arrive(gradient, features, ctx.number, ctx.training), None, None, None


class Listener:
    """A forward hook on the head, heard where a gradient can come back to its output.

    An eager call of the head is told to `on_pass`. In a graph made by torch.compile there is no
    such moment: the output goes through `Carry`, and `on_arrival` is asked in the backward pass
    what gradient to hand on. No graph break either way.

    It goes before other hooks, to see what the linear layer itself put out. Copies and pickles of
    the model get an inert stand-in: an EMA copy or a saved model must not carry the optimizer
    along, nor be weighed, nor need primum to be loaded.
    """

    def __init__(self, head: nn.Linear, on_pass: OnPass, on_arrival: OnArrival) -> None:
        for hook in head._forward_hooks.values():
            if isinstance(hook, Listener):
                raise ValueError(
                    "this head has a Reducer attached already; call its .remove() first"
                )
        self._on_pass: OnPass | None = on_pass
        self._on_arrival: OnArrival | None = on_arrival
        self._head = weakref.ref(head)
        self.compiled = False  # whether a compiled graph has run the head
        self._number = next(_NUMBERS)
        _LISTENERS[self._number] = self
        self._handle: RemovableHandle = head.register_forward_hook(
            self, with_kwargs=True, prepend=True
        )

    def __call__(
        self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        # What comes before a call of `_hear` is traced by torch.compile.
        if not output.requires_grad:
            return None
        features: Tensor = args[0] if args else kwargs["input"]
        if torch.compiler.is_dynamo_compiling():
            self.compiled = True
            carried: Tensor = Carry.apply(  # type: ignore[no-untyped-call]
                output, features, self._number, head.training
            )
            return carried
        self._hear(head, features, output)
        return None

    @eager
    def _hear(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        inside = torch._C._are_functorch_transforms_active()  # torch.func has no backward pass
        if self._on_pass is not None and not inside:
            self._on_pass(head, features, output)

    def arrived(self, gradient: Tensor, features: Tensor, training: bool) -> Tensor | None:
        on_arrival = self._on_arrival
        head = self._head()
        weight = None if head is None else weight_of(head)
        if weight is not None and weight.requires_grad and not _trains(weight):
            return None  # a gradient for another purpose
        return None if on_arrival is None else on_arrival(gradient, lambda: features, training)

    def remove(self) -> None:
        self._handle.remove()
        self._on_pass = self._on_arrival = None  # a compiled graph may go on calling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A function of the standard library that takes anything and does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")
