"""The steps of all optimizers, seen through one hook for the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from primum.compat import eager, parameter
from primum.warn import Once

IDLE_STEPS = 3  # Optimizer steps without a backward pass through the head.


class Listening(Protocol):
    """What is called after steps: the monitor."""

    passes: int
    reached: bool

    def after_step(self, found_inf: Tensor | None) -> None: ...


class Steps:
    """Sees the steps of all optimizers, as a head that was replaced is trained by others.

    Outlives a head that is replaced, and the Reducer with it, to warn of that; not the model.
    """

    _all: ClassVar[list[Steps]] = []
    _hook: ClassVar[RemovableHandle | None] = None  # one for the process

    def __init__(
        self, monitor: Listening, model: nn.Module, head: nn.Linear, name: str, optimizer: Optimizer
    ) -> None:
        self._monitor, self._model = weakref.ref(monitor), weakref.ref(model)
        self._head, self._name = weakref.ref(head), name
        self._optimizer = weakref.ref(optimizer)
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.warn = Once()  # not the monitor's: this warns also once the Reducer is gone
        # A head that was replaced before needs no warning any more.
        self._keep_if(lambda each: each._model() is not model or each._in_model())
        self._all.append(self)
        if Steps._hook is None:
            Steps._hook = register_optimizer_step_post_hook(_after_step)

    def remove(self) -> None:
        self._keep_if(lambda each: each is not self)
        if not self._all and Steps._hook is not None:
            Steps._hook.remove()
            Steps._hook = None

    def _keep_if(self, kept: Callable[[Steps], bool]) -> None:
        """Drop those whose models are gone, and others."""
        self._all[:] = [each for each in self._all if each._model() is not None and kept(each)]

    def after_step(self, stepped: Optimizer) -> None:
        """An optimizer, whichever, has stepped."""
        monitor, own = self._monitor(), stepped is self._optimizer()
        if monitor is not None and monitor.passes:
            self._idle.clear()
        elif own or self._trains_model(stepped):
            self._notice_idle(stepped)
        if monitor is not None and own:
            monitor.after_step(getattr(stepped, "found_inf", None))

    def _in_model(self) -> bool:
        head, model = self._head(), self._model()
        return head is not None and model is not None and any(m is head for m in model.modules())

    def _trains_model(self, stepped: Optimizer) -> bool:
        """Whether another optimizer holds parameters that the model had at its first step."""
        model = self._model()
        if stepped not in self._others and model is not None:
            own = {id(p) for p in model.parameters()}
            held = (id(p) for group in stepped.param_groups for p in group["params"])
            self._others[stepped] = any(p in own for p in held)
        return self._others.get(stepped, False)

    def _notice_idle(self, stepped: Optimizer) -> None:
        self._idle[stepped] = self._idle.get(stepped, 0) + 1
        head, model, monitor = self._head(), self._model(), self._monitor()
        if self._idle[stepped] != IDLE_STEPS or model is None:
            return
        if head is None or not self._in_model():
            why = "it is no longer part of the model; attach again after replacing it"
        elif parameter(head, "weight") is None:
            why = "its weight is now computed from other parameters; detach, or attach before that"
        elif not head.weight.requires_grad:
            why = "it is frozen (requires_grad=False); unfreeze it, or pass the trained head"
        elif head.weight.grad is not None or (monitor is not None and monitor.reached):
            return  # noticed by the monitor, or a phase that trains something else
        else:
            why = (
                "no backward pass went through it; if another layer produces the model's output, "
                "pass it as head="
            )
        steps = f"{IDLE_STEPS} optimizer steps"
        self.warn("idle", f"no weights were computed at {self._name!r} in {steps}: {why}")


@eager
def _after_step(stepped: Optimizer, *_: Any) -> None:
    for each in list(Steps._all):
        try:
            each.after_step(stepped)
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            each.warn("error", f"could not track the steps of {each._name!r}: {why}")
