"""What happens around the head over many steps: fallbacks, bypassed training, time spent.

Everything that a user should know and that no single backward pass can show is noticed here, on
what the host knows, and warned about once.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from primum.compat import parameter, returns, runs_hooks, version
from primum.effect import Effect
from primum.rules import on_host, read
from primum.steps import Steps
from primum.warn import Count, Once

PATIENCE = 2  # Once may be a restored checkpoint, or a step that only makes the optimizer's state.
CHUNKS = 4  # Calls of the head in a pass that are taken for a loss computed in chunks.
TIMED_STEPS = 100
DEAR = 0.2  # Of the time of a step.
BYPASS = (
    "If the model, or another of its class, was compiled and run before attaching, call "
    "torch.compiler.reset() once after attaching; if the head's weight is used without calling the "
    "head (F.linear(x, head.weight), a fused loss), call the head and compute the loss from "
    "its output"
)


class Monitor:
    """Compares the steps of optimizers with the backward passes through the head.

    Args:
        model: As passed to `attach`.
        head: The layer.
        name: Its name in the model.
        optimizer: The one that steps its weight.
        on_step: Called after each of its steps, with the head and the optimizer's `found_inf`.
        weight: What the optimizer changes of a head that is split over ranks.

    Attributes:
        fallbacks: Passes that fell back to plain gradients.
        reasons: Why, and how often, as far as the host knew.
        discarded: Weighed passes whose gradients no step used.
        effect: Whether the weights matter in the first hundred steps.
        steps: Of the optimizer, since attaching.
        found_inf: Above 0 if a fused optimizer skipped its last step.
        counts: Whether steps are counted; not if the optimizer's class runs no hooks.
        bypass: What to do if gradients bypass the hook.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Linear,
        name: str,
        optimizer: Optimizer,
        on_step: Callable[[Any, Tensor | None], None],
        weight: Callable[[], Tensor] | None = None,
    ) -> None:
        self.fallbacks, self.discarded = Count(head.weight.device), Count(head.weight.device)
        self.effect, self.steps = Effect(), 0
        self.found_inf: Tensor | None = None
        self.counts = runs_hooks(optimizer)
        self._name, self._head = name, weakref.ref(head)
        self._on_step, self._weight = on_step, weight
        self.warn = Once()
        self.reasons: Counter[str] = Counter()
        self._seen_version, self._seen_steps, self._foreign_moves = self._version(), 0, 0
        self._added = -1  # how often a gradient was added to the first one; -1 without any
        self._pending: Tensor | int = 0  # weighed passes that no step has used yet
        self._pending_steps = self._pending_version = 0
        self.passes = 0  # backward passes through the head since the last step of its optimizer
        self.reached, self._bypassed, self._arrivals = False, 0, 0
        self._spent = self._timed_from = self._timed_to = 0.0
        self.bypass = BYPASS
        self._used: tuple[weakref.ref[Tensor], int] | None = None
        self._steps_seen = Steps(self, model, head, name, optimizer)

    def remove(self) -> None:
        self._steps_seen.remove()

    def fall_back(self, kind: str, reason: str) -> None:
        """Count a pass that stays plain for a reason that the host knows."""
        self.fallbacks.add(1)
        self.reasons[reason] += 1
        self.warn(kind, f"fell back to plain gradients: {reason}")

    def not_finite(self, objective: Tensor) -> None:
        """Count a pass that stays plain if its objective is infinite, as the device knows."""
        if self.fallbacks.add(_number(objective, lambda value: value == torch.inf)):
            self.warn(
                "values",
                "fell back to plain gradients: the step's values were not finite. If the loop uses "
                "a GradScaler, pass it as scaler=; such steps are then expected",
            )

    def arrived(self, *, again: bool) -> None:
        """Note a gradient at the head's output; `again` if not the first of its backward pass."""
        self._arrivals = self._arrivals + 1 if again else 1
        if self._arrivals == CHUNKS:
            self.warn(
                "chunks",
                f"the head ran {CHUNKS} or more times in one pass, as with a chunked loss. Each "
                "call is reweighted on its own, without the gradients of the others; call the head "
                "once, with all rows",
            )

    def spend(self, seconds: float) -> None:
        """Note how long weighing, or observing, a pass took."""
        self._spent += seconds

    def weighed(self, objective: Tensor, drift: Tensor) -> None:
        """Note a pass whose gradients wait for a step.

        Not one that is not finite, nor one of zero gradients: these leave nothing to discard.
        """
        before = self._pending if self.pending else 0
        finite = _number(objective, lambda value: value < torch.inf)
        self._pending = finite * _number(drift.any(), lambda value: value != 0) + before
        self._pending_steps, self._pending_version = self.steps, self._version()

    @property
    def pending(self) -> bool:
        """Whether gradients of earlier passes were changed and no step has used them yet."""
        used = self._pending_steps != self.steps or self._pending_version != self._version()
        return self.counts and not used and (isinstance(self._pending, Tensor) or self._pending > 0)

    def forget(self) -> None:
        """Drop pending passes: a GradScaler skipped their step."""
        self._pending = 0

    def settle(self, kept: Tensor | None) -> None:
        """At the start of a backward pass: count pending passes as discarded unless `kept`.

        `kept` is whether `.grad` still has values, None if it has been set to None.
        """
        pending = self._pending if self.pending else 0
        gone = pending if kept is None else _number(kept, lambda value: value == 0) * pending
        self._pending = pending - gone
        if self.discarded.add(gone):
            self.warn(
                "discarded",
                f"gradients of {self._name!r} were reweighted, but discarded before an optimizer "
                "step used them. If that backward pass trains another network (a generator through "
                "its discriminator, an actor through its critic) or is not for training, run it "
                "inside `with reducer.paused():`; otherwise primum may change its gradients. If a "
                "GradScaler skipped the step, pass it as scaler=",
            )

    def overtaken(self) -> bool:
        """Whether the head has moved, time after time, without a step of the optimizer.

        Not where all that happened to the gradient is that one was added: no step has used it.
        """
        seen, grad = self._version(), getattr(parameter(self._head(), "weight"), "grad", None)
        added = -1 if grad is None or self._weight is not None else version(grad)
        if self.steps != self._seen_steps:
            self._foreign_moves = 0
        elif seen != self._seen_version and self.counts and added != self._added + 1:
            self._foreign_moves += 1
        self._seen_steps, self._seen_version, self._added = self.steps, seen, added
        return self._foreign_moves >= PATIENCE

    def _version(self) -> int:
        if self._weight is not None:
            return version(self._weight())
        head = self._head()
        return 0 if head is None else version(head.weight)

    def after_step(self, found_inf: Tensor | None) -> None:
        """The optimizer has stepped."""
        self.steps += 1
        self.found_inf = found_inf
        head = self._head()
        weight = parameter(head, "weight")
        if head is not None and weight is not None:
            self._measure(head)
            grad = weight.grad
            self._used = None if grad is None else (weakref.ref(grad), version(grad))
        self._time()
        message = self.effect.after_step(self.reasons, reached=self.passes > 0)
        if message:
            self.warn("effect", message, UserWarning)
        self.reached = self.reached or self.passes > 0
        if not self.reached and weight is not None and weight.grad is not None:
            self._notice_bypass()
        self.passes = 0

    def replaced(self, grad: Tensor | None, accumulator: Node | None) -> bool:
        """Whether `.grad` will be replaced: a step has used it, and autograd.grad is under way."""
        used = self._used
        if grad is None or used is None or used[0]() is not grad or used[1] != version(grad):
            return False
        return accumulator is not None and returns(accumulator)

    def _measure(self, head: nn.Linear) -> None:
        """Call `on_step`; the user's step is made, and an error there must not undo it."""
        try:
            self._on_step(head, self.found_inf)
        except Exception as error:
            self.warn(
                "measure",
                "could not measure how gradients were rescaled before the step (clipping, loss "
                f"scaling): {type(error).__name__}: {error}",
            )

    def time_spent(self) -> tuple[float | None, float]:
        """Seconds spent here per step since the first, and their share of the time of a step."""
        if self.steps < 3:
            return None, 0.0
        elapsed = max(self._timed_to - self._timed_from, 1e-9)
        return self._spent / (self.steps - 1), self._spent / elapsed

    def _time(self) -> None:
        """After the first hundred steps, compare the time spent here with the time of a step."""
        self._timed_to = time.perf_counter()
        if self.steps == 1:
            self._spent, self._timed_from = 0.0, self._timed_to
        elif self.steps == 1 + TIMED_STEPS:
            _, share = self.time_spent()
            if share > DEAR:
                self.warn(
                    "time",
                    f"computing sample weights takes {share:.0%} of the step time (host clock) "
                    f"with head {self._name!r}; a larger tolerance= or a smaller max_iters= "
                    "reduces it",
                    UserWarning,
                )

    def _notice_bypass(self) -> None:
        self._bypassed += 1
        if self._bypassed == PATIENCE:
            self.warn(
                "bypass",
                f"gradients of {self._name!r} bypassed primum's hook, so no sample weights were "
                f"applied. {self.bypass}",
            )


def _number(tensor: Tensor, true: Callable[[Any], Any]) -> Tensor | int:
    """1 if `true` of a scalar, else 0: a number where the host has it, else a tensor."""
    if on_host(tensor):
        return int(true(read(tensor)))
    counted: Tensor = true(tensor).long()
    return counted
