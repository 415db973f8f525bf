"""The hook on the head: its input, the gradient that arrives at its output, and which to weigh."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from primum.hooks.compiled import Carry, Source
from primum.hooks.private import (
    backward_id,
    eager,
    executes,
    executes_in_graph,
    exporting,
    inside_functorch,
    is_sharded,
    returns,
)
from primum.hooks.unsaved import Hook
from primum.kernel.engine import Engine
from primum.kernel.head import Plain, registered

NEAR = 6  # Nodes between the head's output and its weight: views, casts, the transpose.


class HeadCall:
    """One forward call of the head, waiting for its gradient.

    Belongs to the graph (a hook and the metadata of the output's node refer to it) and dies with
    it: a forward pass without a backward pass leaves nothing behind. Holds the head's input until
    the gradient arrives and only a weak reference after that: the graph may live until the next
    forward, the input need not.

    Attributes:
        peers: The processes that may solve together in this pass.
        before: 0 if the coming gradient replaces what is in `.grad`.
        weighted: Whether the explicit form has put weights into the loss already.
        extra_weights: Those of the explicit form. [B].
        differentiated: Whether a second gradient may arrive, as under `create_graph=True`.
    """

    def __init__(
        self, key: object, head: nn.Module, inputs: Tensor, output: Tensor, peers: Any = None
    ) -> None:
        self.peers, self.before = peers, None
        self.weight = registered(head, "weight")
        self.extra_weights: Tensor | None = None
        self.weighted = self.differentiated = False
        self._strong: Tensor | None = inputs
        self._weak = weakref.ref(inputs)
        self._output_nr = output.output_nr
        node = output.grad_fn
        assert node is not None
        self.accumulator = None if self.weight is None else _accumulator(node, self.weight)
        _notes(node)[key] = self

    peers: Any
    before: float | None

    def inputs(self) -> Tensor:
        """The head's input."""
        inputs = self._strong if self._strong is not None else self._weak()
        if inputs is None:
            raise RuntimeError("the head's input was freed by an earlier pass through this graph")
        return inputs

    def release(self) -> None:
        self._strong = None

    def trains_head(self) -> bool:
        """Whether the backward pass under way will add to the gradient of the head's weight.

        `torch.autograd.grad` for another purpose passes through as well: with respect to the input
        for an adversarial example or a gradient penalty, or to the output in the explicit form.
        """
        return self.accumulator is None or executes(self.accumulator)

    @staticmethod
    def of(node: Node, key: object) -> HeadCall | None:
        """The call of the head whose output this node makes, if it does."""
        call: HeadCall | None = _notes(node).get(key)
        return call

    @staticmethod
    def behind(start: Tensor | Node, key: object) -> dict[HeadCall, GradientEdge]:
        """The calls of the head that losses depend on, the nearest first, and where they are."""
        found = {}
        for node in nodes_behind(start, key):
            call = HeadCall.of(node, key)
            if call is not None:
                found[call] = GradientEdge(node, call._output_nr)
        return found


def nodes_behind(start: Tensor | Node, key: object) -> Iterator[Node]:
    """The nodes that losses depend on, the nearest first, and none behind a call of the head."""
    seen: set[Node | None] = {None}
    waiting = deque([start.grad_fn if isinstance(start, Tensor) else start])
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if HeadCall.of(node, key) is None:
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


class CompiledCall:
    """A call of the head in a compiled graph, which hands over its input with the gradient."""

    before: float | None = None

    def __init__(self, inputs: Tensor, peers: Any) -> None:
        self.peers, self._inputs = peers, inputs

    def inputs(self) -> Tensor:
        return self._inputs


Method = TypeVar("Method", bound=Callable[..., Any])


def plain_on_error(method: Method) -> Method:
    """A method of a `HeadHook` that returns None, for plain gradients, after an error of ours.

    The last tensor among its arguments has the shape of the head's output. An error of the process
    group is the run's own and is raised.
    """

    @wraps(method)
    def call(self: HeadHook, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            engine = self.engine
            if engine is None or engine.builder.broken:
                raise
            engine.passes += 1  # it came by here
            engine.fall_back([each for each in args if isinstance(each, Tensor)][-1], error)
            return None

    return cast(Method, call)


class HeadHook(Source):
    """A forward hook on the head that hands the gradients of its output to the engine.

    An eager call of the head gets a hook on its output. In a graph made by torch.compile there is
    no such moment: there the output goes through `Carry`. No graph break either way. The head owns
    this, and this owns the engine and the Reducer.

    Args:
        layer: The head.
        engine: Computes the weights.
        reducer: What `attach` returns; lives as long as this.
        peers: Which processes solve together in the forward pass under way, `eager` or compiled.

    Attributes:
        enabled: Whether weights are computed.
        called: Whether the head has run since attaching.
        compiled: Whether a compiled graph has run it.
        checked_losses: Whether the explicit form has seen losses in the order of the head's rows.
    """

    def __init__(
        self,
        layer: nn.Linear,
        engine: Engine,
        reducer: Any,
        peers: Callable[[bool], Any] = lambda eager: None,
    ) -> None:
        super().__init__()
        self.engine: Engine | None = engine
        self.reducer, self._head, self._peers = reducer, engine.head, peers
        self.enabled, self.called, self.compiled = True, False, False
        self.checked_losses = False
        self._backward: int | None = -1  # the backward pass of the last arrival
        self._hook = Hook(layer, self)

    def remove(self) -> None:
        self._hook.remove()
        self.engine = self.reducer = None  # a compiled graph may go on calling

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        # What comes before a call of `_on_forward` is traced by torch.compile.
        if not isinstance(output, Tensor) or not output.requires_grad or exporting():
            return None
        given = (*args, *kwargs.values())  # a subclass may name its input as it likes
        if not given or not isinstance(given[0], Tensor):
            return None
        if torch.compiler.is_dynamo_compiling():
            self.compiled = True
            carried: Tensor = Carry.apply(  # type: ignore[no-untyped-call]
                output, given[0], self.number
            )
            return carried
        self._on_forward(layer, given[0], output)
        return None

    @eager
    @plain_on_error
    def _on_forward(self, layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        engine = self.engine
        if engine is None or inside_functorch():
            return
        if engine.idle:
            engine.passes += 1
            return
        if not self._head.is_layer(layer):
            engine.warn(
                "copy",
                "gradients stay plain: a copy of the head ran (nn.DataParallel makes one per "
                "device); use DistributedDataParallel",
            )
            return
        weight = registered(layer, "weight")
        if weight is not None and not weight.requires_grad:
            return  # frozen for this pass: it trains something else
        call = HeadCall(self, layer, inputs, output, self._peers(True))
        self.called = True
        hook: Callable[[Tensor], Tensor | None] = partial(self._on_gradient, call)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    @eager
    @plain_on_error
    def _on_gradient(self, call: HeadCall, gradient: Tensor) -> Tensor | None:
        """The gradient arrived: hand on the weighted one. None leaves it as it is."""
        engine, weight = self.engine, self._head.weight
        if engine is None or not self._head.alive or not call.trains_head():
            return None  # a gradient for another purpose
        if inside_functorch():
            raise Plain(
                "the gradients of single losses or samples are computed (torchjd, torch.func), and "
                "weights need the gradient of their mean"
            )
        if weight is not call.weight and not is_sharded(weight):  # fully_shard replaces it
            return None  # a gradient of other weights
        if self._head.spent and call.accumulator is not None and returns(call.accumulator):
            call.before = 0.0  # `torch.autograd.grad`, after a step has used what is in `.grad`
        weighted = self._arrive(engine, call, gradient)
        call.release()
        return weighted

    @eager
    @plain_on_error
    def arrived(self, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """The gradient to hand on in a compiled graph; None for the one that arrived."""
        engine, weight = self.engine, self._head.weight
        if engine is None or weight is None or not weight.requires_grad:
            return None
        if not is_sharded(weight) and not executes_in_graph(weight):
            return None  # a gradient for another purpose
        return self._arrive(engine, CompiledCall(inputs, self._peers(False)), gradient)

    def _arrive(
        self, engine: Engine, call: HeadCall | CompiledCall, gradient: Tensor
    ) -> Tensor | None:
        engine.passes += 1
        if engine.idle:
            return None
        task = backward_id()
        again = task is not None and task == self._backward
        self._backward = task
        if again:  # other ranks may have called their heads less often in this pass
            call.peers = engine.builder.again(call.peers)
        engine.arrived(gradient, again=again)
        if isinstance(call, HeadCall):
            if call.weighted:
                if call.extra_weights is not None:
                    engine.handed_on()
                return None
            if call.differentiated:
                return None  # a gradient of weighted gradients
            call.differentiated = gradient.requires_grad
        if not self.enabled:
            return None
        weighted = engine.reweight([call], [gradient])
        if weighted is None:
            return None
        if not gradient.requires_grad:  # else gradients of the weighted ones follow
            engine.handed_on()
        return weighted[0]
