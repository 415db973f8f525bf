"""A forward hook that copies, pickles and scripts of its module do not have."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Tuple  # noqa: UP035

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from primum.hooks.private import FORWARD_HOOKS, forward_hooks

_NUMBERS = itertools.count()


class Hook:
    """A forward hook that copies, pickles and scripts of its module do not have.

    An EMA copy or a saved model must not carry the optimizer along, nor be reweighted, nor need
    primum to be loaded: while the hook is there, the module's own `__getstate__` leaves it out. And
    `torch.jit.script`, which compiles hooks from their source, is shown one that does nothing.
    """

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], *, prepend: bool = True
    ) -> None:
        def call(module: nn.Module, args: Any, *rest: Any) -> Any:
            # Without kwargs where a tool put it on another module, as prepare_qat does.
            kwargs = rest[0] if len(rest) > 1 else {}
            return function(module, args, kwargs, rest[-1])

        call.__wrapped__ = _scripted  # type: ignore[attr-defined]
        call.__name__ = f"primum_{next(_NUMBERS)}"
        call.primum = function  # type: ignore[attr-defined]
        # Before other hooks, if `prepend`, to see what the layer itself put out.
        self._handle: RemovableHandle = module.register_forward_hook(
            call, with_kwargs=True, prepend=prepend
        )
        self._module = weakref.ref(module)
        module.__dict__["__getstate__"] = _StateWithoutHooks(module)

    def remove(self) -> None:
        self._handle.remove()
        module = self._module()
        if module is not None and not hooked(module):
            module.__dict__.pop("__getstate__", None)


def hooked(module: nn.Module) -> list[Any]:
    """The functions that a `Hook` put on a module."""
    hooks = forward_hooks(module).values()
    return [hook.primum for hook in hooks if hasattr(hook, "primum")]


def _scripted(self: Any, input: Tuple[Tensor], output: Tensor) -> None:  # noqa: UP006
    """What torch.jit reads: it compiles the source, and knows `Tuple` but not `tuple`."""
    return None


class _StateWithoutHooks:
    """A module's `__getstate__`: its state as if no `Hook` were there."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateWithoutHooks:
        copied = memo.get(id(self._module()))  # of a class that copies its `__dict__` itself
        return self if copied is None else _StateWithoutHooks(copied)

    def __call__(self) -> dict[str, Any]:
        module = self._module()
        assert module is not None
        own = getattr(type(module), "__getstate__", None)
        state = dict(module.__dict__ if own in (None, _BUILT_IN) else own(module))
        state.pop("__getstate__", None)
        ours = {key for key, hook in forward_hooks(module).items() if hasattr(hook, "primum")}
        for name, value in state.items():
            if name.startswith(FORWARD_HOOKS) and isinstance(value, dict):
                state[name] = OrderedDict((k, v) for k, v in value.items() if k not in ours)
        return state


_BUILT_IN = getattr(object, "__getstate__", None)  # Python 3.11
