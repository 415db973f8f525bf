"""What happens around the head over many steps: fallbacks, bypassed training, time spent.

Everything that a user should know and that no single backward pass can show is noticed here, on
what the host knows, and warned about once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from primum.compat import eager, parameter, version
from primum.warn import Count, warn

PATIENCE = 2  # Once may be a restored checkpoint, or a step that only makes the optimizer's state.
IDLE_STEPS = 3  # Optimizer steps without a backward pass through the head.
TIMED_STEPS = 100
DEAR = 0.2  # Of the time of a step.


class Monitor:
    """Compares the steps of optimizers with the backward passes through the head.

    Args:
        model: As passed to `attach`.
        head: The layer.
        name: Its name in the model.
        optimizer: The one that steps its weight.
        on_step: Called after each of its steps, with the head and the optimizer's `found_inf`.

    Attributes:
        fallbacks: Passes that fell back to plain gradients.
        discarded: Weighed passes whose gradients no step used.
        steps: Of the optimizer, since attaching.
        found_inf: Above 0 if a fused optimizer skipped its last step.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Linear,
        name: str,
        optimizer: Optimizer,
        on_step: Callable[[nn.Linear, Tensor | None], None],
    ) -> None:
        self.fallbacks, self.discarded = Count(head.weight.device), Count(head.weight.device)
        self.steps = 0
        self.found_inf: Tensor | None = None
        self.name = name
        self._model, self._head = weakref.ref(model), weakref.ref(head)
        self._optimizer = weakref.ref(optimizer)
        self._on_step = on_step
        self._warned: set[str] = set()
        self._seen_version, self._seen_steps, self._foreign_moves = version(head.weight), 0, 0
        self._pending: Tensor | None = None  # whether the last pass, still unused, was weighed
        self._pending_steps = 0
        self._passes = 0  # backward passes through the head since the last step of its optimizer
        self._idle = self._bypassed = 0
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._spent, self._timed_from = 0.0, 0.0
        me = weakref.ref(self)

        @eager
        def after_step(stepped: Optimizer, *_: Any) -> None:
            monitor = me()
            if monitor is not None:
                monitor._after_step(stepped)

        # Of all optimizers: a head that was replaced is trained by another one.
        self._handle = register_optimizer_step_post_hook(after_step)
        # A class that skips Optimizer.__init__ runs no hooks.
        self.counts = hasattr(optimizer, "_optimizer_step_post_hooks")

    def remove(self) -> None:
        self._handle.remove()

    def warn(self, kind: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
        """Warn, the first time for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message, category)

    def fall_back(self, kind: str, reason: str) -> None:
        """Count a pass that stays plain for a reason that the host knows."""
        self.fallbacks.add(1)
        self.warn(kind, f"plain gradients in a step: {reason}")

    def not_finite(self, failed: Tensor) -> None:
        """Count a pass that stays plain if `failed`, which the device knows."""
        if self.fallbacks.add(failed):
            self.warn(
                "values",
                "plain gradients in a step: its values were not finite. If the loop has a "
                "GradScaler, pass it as scaler=: such steps are then expected",
            )

    def passed(self) -> None:
        """A gradient arrived at the head."""
        self._passes += 1
        self._idle = 0

    def weighed(self, finite: Tensor, seconds: float) -> None:
        """The pass under way was weighed, if `finite`, and took that long."""
        self._pending, self._pending_steps = finite, self.steps
        self._spent += seconds

    @property
    def pending(self) -> bool:
        """Whether gradients of an earlier pass were weighed and no step has used them yet."""
        return self.counts and self._pending is not None and self._pending_steps == self.steps

    def settle(self, kept: Tensor | bool, *, skipped: bool = False) -> None:
        """A new backward pass begins: count pending gradients as discarded unless `kept`.

        Not if a GradScaler `skipped` their step.
        """
        if not self.pending or self._pending is None:
            self._pending = None
            return
        if skipped:
            self._pending = None
            return
        gone = ~kept & self._pending if isinstance(kept, Tensor) else self._pending
        if kept is not True and self.discarded.add(gone):
            self.warn(
                "discarded",
                f"gradients were reweighted for a step of {self._kind()}, but were discarded "
                "without one. If that backward pass trains another network (a generator through "
                "its discriminator, an actor through its critic) or is not for training at all, "
                "run it inside `with reducer.paused():`; its gradients were changed",
            )
        if not isinstance(kept, Tensor):
            self._pending = self._pending if kept else None

    def overtaken(self, head: nn.Linear) -> bool:
        """Whether the head has moved, time after time, without a step of the optimizer."""
        seen = version(head.weight)
        if self.steps != self._seen_steps:
            self._foreign_moves = 0
        elif seen != self._seen_version and self.counts:
            self._foreign_moves += 1
        self._seen_steps, self._seen_version = self.steps, seen
        return self._foreign_moves >= PATIENCE

    def _kind(self) -> str:
        return type(self._optimizer()).__name__

    def _after_step(self, stepped: Optimizer) -> None:
        own = stepped is self._optimizer()
        if own:
            self.steps += 1
            self.found_inf = getattr(stepped, "found_inf", None)
            self._measure()
            self._time()
        if own and self._passes == 0:
            self._notice_bypass()
        if self._passes == 0 and (own or self._trains_model(stepped)):
            self._notice_idle()
        if own:
            self._passes = 0

    def _measure(self) -> None:
        """Call `on_step`; the user's step is made, and an error there must not undo it."""
        head = self._head()
        if head is None or parameter(head, "weight") is None:
            return
        try:
            self._on_step(head, self.found_inf)
        except Exception as error:
            self.warn(
                "measure",
                "what was done to the gradients before a step (clipping, loss scaling) could not "
                f"be measured: {type(error).__name__}: {error}",
            )

    def _time(self) -> None:
        """After the first hundred steps, compare the time spent here with the time of a step."""
        if self.steps == 1:
            self._spent, self._timed_from = 0.0, time.perf_counter()
        elif self.steps == 1 + TIMED_STEPS:
            share = self._spent / max(time.perf_counter() - self._timed_from, 1e-9)
            if share > DEAR:
                self.warn(
                    "time",
                    f"computing sample weights takes {share:.0%} of the time of a step, on the "
                    f"host, with head {self.name!r}. A larger tolerance= or fewer max_iters= make "
                    "it cheaper; a larger model above the head makes it matter less",
                    UserWarning,
                )

    def _notice_bypass(self) -> None:
        head = self._head()
        weight = None if head is None else parameter(head, "weight")
        if weight is None or weight.grad is None:
            return
        self._bypassed += 1
        if self._bypassed == PATIENCE:
            self.warn(
                "bypass",
                f"gradients of {self.name!r} bypassed primum's hook, so no sample weights were "
                "applied. If the model was compiled and run before attaching, call "
                "torch.compiler.reset() once after it; if the head's weight is used without "
                "calling the head (as in F.linear(x, head.weight), or a loss that is fused with "
                "it), call the head",
            )

    def _notice_idle(self) -> None:
        self._idle += 1
        head, model = self._head(), self._model()
        if self._idle != IDLE_STEPS or head is None or model is None:
            return
        if not any(module is head for module in model.modules()):
            why = "it is no longer part of the model: attach again after replacing it"
        elif parameter(head, "weight") is None:
            why = "its weight is computed from other parameters now: attach before that, or detach"
        elif not head.weight.requires_grad:
            why = (
                "it is frozen (requires_grad=False): unfreeze it, or pass the head that is trained"
            )
        else:
            why = (
                "no backward pass went through it: is it the layer that makes the model's output? "
                "If not, pass head="
            )
        self.warn(
            "idle",
            f"{IDLE_STEPS} optimizer steps were made, but nothing was weighed at {self.name!r}; "
            f"{why}",
        )

    def _trains_model(self, stepped: Optimizer) -> bool:
        """Whether another optimizer holds parameters of the model, as they were at its first step."""
        model = self._model()
        if model is None:
            return False
        if stepped not in self._others:
            own = {id(p) for p in model.parameters()}
            held = (id(p) for group in stepped.param_groups for p in group["params"])
            self._others[stepped] = any(p in own for p in held)
        return self._others[stepped]
