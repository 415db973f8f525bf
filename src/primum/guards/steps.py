"""Steps of optimizers, seen through one pair of hooks for the process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from primum.hooks.private import eager, runs_hooks, version
from primum.kernel.engine import Engine, Observer, weak
from primum.kernel.head import Plain, registered
from primum.kernel.warn import Once

PATIENCE = 2  # Once may be a restored checkpoint, or a step that only makes the optimizer's state.
IDLE_STEPS = 3  # Optimizer steps without a backward pass through the head.
BYPASS = (
    "If the model, or another of its class, was compiled and run before attaching, call "
    "torch.compiler.reset() once after attaching; if the head's weight is used without calling the "
    "head (F.linear(x, head.weight), a fused loss), call the head instead"
)


class StepWatch(Observer):
    """Counts the steps of the head's optimizer, and compares them with the passes through the head.

    Args:
        engine: Whose head is watched.
        model: As passed to `attach`.
        before_step: Called before a step of an optimizer of the head.
        after_step: Called after a step of the optimizer of its weight, with whether a backward
            pass has gone through the head before it.

    Attributes:
        steps: Of the optimizer of the head's weight, since attaching.
        found_inf: Above 0 if a fused optimizer skipped its last step.
        counts: Whether steps are counted; not if the optimizer's class runs no hooks.
        bypass: What to do if gradients bypass the hook.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        before_step: Callable[[Optimizer], None],
        *after_step: Callable[[bool], None],
    ) -> None:
        self._engine, self.warn = weak(engine), engine.warn
        self._before_step, self._after_step = before_step, after_step
        self.optimizer = engine.head.optimizers["weight"]
        self.steps, self.counts, self.bypass = 0, runs_hooks(self.optimizer), BYPASS
        self.found_inf: Tensor | None = None
        self.reached = False  # by any pass so far
        self._passes = self._bypassed = self._foreign_moves = self._seen_steps = 0
        self._seen_version, self._added = engine.head.version, -1
        self._entry = Steps(self, model, engine.head.layer, engine.head.name, self.optimizer)

    def remove(self) -> None:
        self._entry.remove()

    @property
    def model(self) -> nn.Module | None:
        """As passed to `attach`; None if it is gone."""
        return self._entry.model()

    @property
    def passed(self) -> bool:
        """Whether a backward pass has gone through the head since the last step."""
        return self._engine.passes > self._passes

    def before_solving(self, explicit: bool) -> None:
        """Plain if the head has moved, time after time, without a step of the optimizer."""
        head = self._engine.head
        # Not where all that happened to the gradient is that one was added: no step has used it.
        grad = getattr(head.weight, "grad", None)
        seen, added = head.version, -1 if grad is None else version(grad)
        if self.steps != self._seen_steps:
            self._foreign_moves = 0
        elif seen != self._seen_version and self.counts and added != self._added + 1:
            self._foreign_moves += 1
        self._seen_steps, self._seen_version, self._added = self.steps, seen, added
        if self._foreign_moves >= PATIENCE:
            raise Plain(
                "the head's weight is not updated by the optimizer passed to attach (was it "
                "rebuilt?); call .remove() and attach again with the one that trains it"
            )

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; the user's step must not fail because of us."""
        if optimizer not in self._engine.head.optimizers.values() or not self._engine.head.alive:
            return
        try:
            self._before_step(optimizer)
        except Exception as error:
            self._engine.warn(
                "measure",
                "could not measure how gradients were rescaled before the step (clipping, loss "
                f"scaling): {type(error).__name__}: {error}",
            )

    def after(self) -> None:
        """The optimizer of the head's weight has stepped."""
        head = self._engine.head
        self.steps += 1
        found = getattr(self.optimizer, "found_inf", None)
        self.found_inf = found if isinstance(found, Tensor) else None
        for each in self._after_step:
            each(self.passed)
        if head.alive and head.weight is not None:
            head.mark_used()
        self.reached = self.reached or self.passed
        if not self.reached and "weight" in head.grads():
            self._notice_bypass()
        self._passes = self._engine.passes

    def _notice_bypass(self) -> None:
        self._bypassed += 1
        if self._bypassed == PATIENCE:
            self._engine.warn(
                "bypass",
                f"gradients of {self._engine.head.name!r} bypassed primum's hook, so no sample "
                f"weights were applied. {self.bypass}",
            )


class Steps:
    """Sees the steps of all optimizers, as a head that was replaced is trained by others.

    Outlives a head that is replaced, and the Reducer with it, to warn of that; not the model.
    """

    _all: ClassVar[list[Steps]] = []
    _hooks: ClassVar[list[RemovableHandle]] = []  # one pair for the process

    def __init__(
        self, watch: StepWatch, model: nn.Module, head: nn.Linear, name: str, optimizer: Optimizer
    ) -> None:
        self._watch, self._stepped = weakref.ref(watch), False
        self.model = weakref.ref(model, self._on_model_gone)
        self._head, self._name = weakref.ref(head), name
        self._optimizer = weakref.ref(optimizer)
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.warn = Once()  # not the engine's: this warns also once the Reducer is gone
        # A head that was replaced before needs no warning any more.
        self._keep_if(lambda each: each.model() is not model or each._in_model())
        self._all.append(self)
        if not Steps._hooks:
            Steps._hooks += [
                register_optimizer_step_pre_hook(_before_step),
                register_optimizer_step_post_hook(_after_step),
            ]

    def remove(self) -> None:
        self._keep_if(lambda each: each is not self)
        if not self._all:
            while Steps._hooks:
                Steps._hooks.pop().remove()

    def _keep_if(self, kept: Callable[[Steps], bool]) -> None:
        """Drop those whose models are gone, and others."""
        self._all[:] = [each for each in self._all if each.model() is not None and kept(each)]

    def _on_model_gone(self, _: object) -> None:
        """skorch's `fit` after `initialize`, for one, builds another model."""
        optimizer = self._optimizer()
        if self in self._all and not self._stepped and optimizer is not None and self._watch():
            logging.getLogger("primum").warning(
                "primum: the model of head %r no longer exists, and its optimizer has not stepped; "
                "if training builds a new model, attach to that one",
                self._name,
            )

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer, whichever, is about to step."""
        watch = self._watch()
        if watch is not None:
            watch.before(optimizer)

    def after(self, stepped: Optimizer) -> None:
        """An optimizer, whichever, has stepped."""
        watch, own = self._watch(), stepped is self._optimizer()
        self._stepped = self._stepped or own
        if watch is not None and watch.passed:
            self._idle.clear()
        elif own or self._trains_model(stepped):
            self._notice_idle(stepped)
        if watch is not None and own:
            watch.after()

    def _in_model(self) -> bool:
        head, model = self._head(), self.model()
        return head is not None and model is not None and any(m is head for m in model.modules())

    def _trains_model(self, stepped: Optimizer) -> bool:
        """Whether another optimizer holds parameters that the model had at its first step."""
        model = self.model()
        if stepped not in self._others and model is not None:
            own = {id(p) for p in model.parameters()}
            held = (id(p) for group in stepped.param_groups for p in group["params"])
            self._others[stepped] = any(p in own for p in held)
        return self._others.get(stepped, False)

    def _notice_idle(self, stepped: Optimizer) -> None:
        self._idle[stepped] = self._idle.get(stepped, 0) + 1
        head, model, watch = self._head(), self.model(), self._watch()
        if self._idle[stepped] != IDLE_STEPS or model is None:
            return
        if head is None or not self._in_model():
            why = "it is no longer part of the model; attach again after replacing it"
        elif registered(head, "weight") is None:
            why = "its weight is now computed from other parameters; detach, or attach before that"
        elif not head.weight.requires_grad:
            why = "it is frozen (requires_grad=False); unfreeze it, or pass the trained head"
        elif head.weight.grad is not None or (watch is not None and watch.reached):
            return  # noticed as a bypass, or a phase that trains something else
        else:
            why = (
                "no backward pass went through it; if another layer produces the model's output, "
                "pass it as head="
            )
        steps = f"{IDLE_STEPS} optimizer steps"
        once = self.warn if watch is None else watch.warn  # the output check says it, too
        once("idle", f"no weights were computed at {self._name!r} in {steps}: {why}")


@eager
@torch.no_grad()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _has_closure(args, kwargs):
        for each in list(Steps._all):
            each.before(optimizer)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether backward and clipping happen within the step, as in Lightning."""
    return any(map(callable, (*args[1:], *kwargs.values())))


@eager
def _after_step(stepped: Optimizer, args: Any, kwargs: Any) -> None:
    for each in list(Steps._all):
        try:
            if _has_closure(args, kwargs):
                each.before(stepped)
            each.after(stepped)
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            each.warn("error", f"could not track the steps of {each._name!r}: {why}")
