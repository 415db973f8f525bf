"""1 - The head's input and the gradient that arrives at its output, from the user's own loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class Pass:
    """One forward call of the head, waiting for its gradient.

    Holds the head's input until the gradient arrives and only a weak reference after that: the
    graph may live until the next forward, the input need not.
    """

    def __init__(self, features: Tensor, output: Tensor) -> None:
        self._strong: Tensor | None = features
        self._weak = weakref.ref(features)
        self.edge: GradientEdge | None = get_gradient_edge(output)
        self.weighed = False  # the explicit form has put the weights into the loss already

    def features(self) -> Tensor:
        """The head's input."""
        features = self._strong if self._strong is not None else self._weak()
        if features is None:
            raise RuntimeError("the head's input is gone: this graph was used before")
        return features

    def release(self) -> None:
        self._strong = self.edge = None


class Listener:
    """A forward hook on the head that calls `on_pass` for calls that a gradient can come back to.

    Copies and pickles of the model get an inert stand-in: an EMA copy or a saved model must not
    carry the optimizer along, nor be weighed.
    """

    def __init__(self, head: nn.Linear, on_pass: Callable[[Tensor, Tensor], None]) -> None:
        for hook in head._forward_hooks.values():
            if isinstance(hook, Listener):
                raise ValueError(
                    "this head has a Reducer attached already; call its .remove() first"
                )
        self._head = weakref.ref(head)
        self._on_pass = on_pass
        self._handle: RemovableHandle = head.register_forward_hook(self, with_kwargs=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if head is self._head() and torch.is_grad_enabled() and output.requires_grad:
            self._on_pass(args[0] if args else kwargs["input"], output)

    def remove(self) -> None:
        self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


def inert(*_: Any) -> None:
    """What is left of a Listener in a copy of the model."""


def _make_inert() -> Callable[..., None]:
    return inert
