"""Whether row i of the head's output belongs to row i of the model's output and to no other.

Seen in the first forward pass that trains. Otherwise weights per row are not weights per sample:
gradients stay plain, and the message names the way out, the explicit form.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from primum.hooks.compiled import Carry
from primum.hooks.head_hook import HeadCall, HeadHook
from primum.hooks.private import backward_id, exporting, fsdp_modules, inside_functorch
from primum.hooks.unsaved import Hook
from primum.kernel.engine import Engine, Observer, weak
from primum.kernel.head import Plain
from primum.setup.find import candidates
from primum.setup.validate import PRIVACY, is_private

_log = logging.getLogger("primum")

MOST_NODES = 100_000
MOST_PASSES = 5  # Without a verdict, as from values that are not finite.
UNCALLED = 3  # Passes without the head after which that is said.
# Nodes that hide a part of the graph, or whose backward has effects of its own.
OPAQUE = ("Checkpoint", "Compiled", "DDPSink", Carry.__name__)

WAY_OUT = "compute the loss as loss = reducer(losses), with one loss per sample"
MIXED = (
    "is mixed over its rows on the way to the model's output (batch norm, a softmax over the "
    f"batch, a graph) or put in another order; {WAY_OUT}"
)
PART = (
    "is only part of the model's output: other parameters contribute to it too (a second head, a "
    "gate, a layer after it) or make another output that the loss uses (a scale, a value); "
    f"{WAY_OUT}, or pass head= the layer that makes the output"
)


class OutputCheck(Observer):
    """A hook on the model that looks at forward passes in training until it knows.

    Up to two small backward passes, from one row of an output to the output of the head, run hooks
    on tensors in between, and leave everything else as it is.

    Args:
        model: As passed to `attach`.
        hook: On the head; a weak reference is kept, as of the engine.
        engine: Asks before it solves.

    Attributes:
        trouble: Why weights per row are not weights per sample; "" if nothing speaks against it.
    """

    def __init__(self, model: nn.Module, hook: HeadHook, engine: Engine) -> None:
        self.trouble, self._waiting = "", False
        self._backward: int | None = None
        self._output = f"the output of {engine.head.name!r}"
        self._key, self._engine = weakref.ref(hook), weak(engine)
        self._passes = self._uncalled = 0
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # before what it adds to the graph
        self._hook = None if engine.head.is_layer(model) else Hook(model, self, prepend=False)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def before_solving(self, explicit: bool) -> None:
        if is_private(self._engine.head.weight):
            raise Plain(PRIVACY)
        if self._waiting and not explicit:
            self._backward = backward_id() if self._backward is None else self._backward
            self._waiting = self._backward == backward_id()  # else that pass is over
        if self.trouble and not explicit:
            raise Plain(self.trouble)
        if self._waiting and not explicit:
            raise Plain("this pass shows whether the loss uses other outputs", counted=False)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or exporting() or inside_functorch():
            return
        hook = self._key()
        if hook is None or hook.engine is None:
            self.remove()
        elif torch.is_grad_enabled() and not hook.engine.idle:
            engine, hook.engine = hook.engine, None  # gradients on the way are not for the engine
            try:
                self._look(model, hook, list(_tensors(output)))
            except Exception as error:
                self.remove()
                _log.info("primum: could not check the model's output: %r", error)
            finally:
                hook.engine = engine

    def _look(self, model: nn.Module, hook: HeadHook, tensors: list[Tensor]) -> None:
        if not hook.called and self._uncalled >= UNCALLED:
            return
        found = [_trace(each, hook) for each in tensors if each.grad_fn is not None]
        called = any(each.calls for each in found)
        if self.trouble or hook.compiled or any(each.hidden for each in found):
            self.remove()
        elif found and not called:
            self._look_elsewhere(model, hook, found)
        elif called:
            self._passes += 1
            certain = self._judge(found, model)
            if (certain and model.training) or self._passes == MOST_PASSES:
                self.remove()

    def _look_elsewhere(self, model: nn.Module, hook: HeadHook, found: list[_Trace]) -> None:
        """The head did not make these outputs."""
        head = self._engine.head
        if hook.called:  # in an earlier pass not: then it runs on what the model puts out
            self.remove()
            if not self._uncalled:
                instead = candidates(model, but=head.layer)
                self.trouble = (
                    f"{self._output} does not reach the model's output; {instead}, or {WAY_OUT}"
                )
        elif head.weight is not None and head.weight.requires_grad:
            self._uncalled += 1
            unused = all(head.weight is not param for each in found for param in each.params)
            if self._uncalled == UNCALLED and unused:
                text = f"the model does not call {head.name!r}, so no weights are computed"
                self._engine.warn("idle", f"{text}; {candidates(model, but=head.layer)}")

    def _judge(self, found: list[_Trace], model: nn.Module) -> bool:
        """Judge outputs that have rows. Whether that is certain."""
        edges = [edge.node for each in found for edge in each.calls.values()]
        behind = _walk(edges)[1]
        rows = {call.inputs().shape[0] for each in found for call in each.calls}
        found = [each for each in found if each.output.dim() > 0]
        said: list[str | None] = []
        for each in found:
            if each.calls:
                # A temperature or the scale of a norm after the head leaves rows as they are.
                apart = any(p.dim() > 1 or p in behind for p in each.params)
                said.append(PART if apart else self._rows(each, model))
            else:  # of parameters of its own, with as many rows: a second head?
                beside = len(each.output) in rows and not each.params <= behind
                said.append(PART if beside else "")
        of_head = [text for each, text in zip(found, said, strict=True) if each.calls]
        if of_head and all(of_head):
            self.trouble = f"{self._output} {of_head[0]}"
            return True
        for each, text in zip(found, said, strict=True):
            if text:  # of several outputs, one may be there for something else than the loss
                self._waiting = True
                output: Any = each.output
                output.register_hook(partial(self._used, f"{self._output} {text}"))
        return not any(said) and None not in said

    def _rows(self, found: _Trace, model: nn.Module) -> str | None:
        """What is wrong with the rows of an output; "" if nothing, None if this pass hides it."""
        (call, edge), *more = found.calls.items()
        output, shape = found.output, call.inputs().shape[:-1]
        if more or not shape:  # several calls are reweighted apart, which is said elsewhere
            return ""
        width = self._engine.head.layer.weight.shape[0]
        rows = output.shape[0]
        if rows % shape[0] != 0:  # or by tokens: [B * T, V] -> [B, T, V]
            rows = shape.numel()
            if (output.shape[-1], output.numel()) != (width, rows * width):
                return (
                    f"has {shape[0]} rows, and the model's output has shape {list(output.shape)} "
                    f"(choices of a question, a chosen and a rejected answer); {WAY_OUT}"
                )
        if output.grad_fn is edge.node or any(True for _ in fsdp_modules(model)):
            return ""
        mixed = _mixed(output, edge, rows, shape[0])
        return MIXED if mixed else None if mixed is None else ""

    def _used(self, text: str, gradient: Tensor) -> None:
        if self._waiting and gradient.any():  # SYNC: in the first pass
            self.trouble = text


@dataclass(frozen=True)
class _Trace:
    """What an output depends on: calls of the head, parameters beside, what cannot be seen."""

    output: Tensor
    calls: dict[HeadCall, GradientEdge]
    params: set[Tensor]
    hidden: bool


def _trace(output: Tensor, key: HeadHook) -> _Trace:
    assert output.grad_fn is not None
    nodes, params = _walk([output.grad_fn], key)
    hidden = len(nodes) >= MOST_NODES or any(word in n.name() for n in nodes for word in OPAQUE)
    return _Trace(output, HeadCall.behind(output, key), params, hidden)


def _walk(start: list[Node], key: HeadHook | None = None) -> tuple[set[Node], set[Tensor]]:
    """The nodes behind some, none behind a call of the head, and the parameters among them."""
    seen: set[Node] = set()
    while start and len(seen) < MOST_NODES:
        node = start.pop()
        if node not in seen and (key is None or HeadCall.of(node, key) is None):
            start += [below for below, _ in node.next_functions if below is not None]
        seen.add(node)
    return seen, {node.variable for node in seen if hasattr(node, "variable")}


def _mixed(output: Tensor, edge: GradientEdge, rows: int, samples: int) -> bool | None:
    """Whether a row of the output depends on other samples; None if this pass does not tell.

    By the gradients of the first row alone, and of one in the middle.
    """
    unknown = samples < 2
    for row in (0, rows // 2):
        alone = torch.zeros_like(output, memory_format=torch.contiguous_format)
        own = alone.view(rows, -1)[row]
        own.copy_(torch.arange(len(own), device=own.device).cos())
        (gradient,) = torch.autograd.grad(output, edge, alone, retain_graph=True)
        reached = gradient.reshape(samples, -1).ne(0).any(1)
        itself = reached[row * samples // rows]
        signs = torch.stack((gradient.isfinite().all(), itself, reached.sum() > itself))
        finite, one, others = signs.tolist()  # SYNC: once
        if finite and others:
            return True
        unknown = unknown or not (finite and one)
    return None if unknown else False


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in an output: alone, in tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    else:
        held = output if isinstance(output, list | tuple) else vars(output).values()
        for each in held:
            if isinstance(each, Tensor | list | tuple | Mapping):
                yield from _tensors(each)
