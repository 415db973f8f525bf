"""Notice training that goes past us: a silent no-op is the worst bug a plug-in can have."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo as eager  # torch.compiler.disable, imported lazily
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from primum.capture import weight_of

PATIENCE = 2  # Once may be a restored checkpoint, or a step that only makes the optimizer's state.


class Watch:
    """Compares the steps of the optimizer with what is heard and seen of the head.

    The optimizer steps on gradients of the head that never came by: the hook is not called, as in
    a graph that torch.compile made before it was there. That is warned about, once. Or the head
    moves, but not by this optimizer: `overtaken` says so. Reads only what the host has; the
    optimizer holds a weak reference. `on_step` is called after each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        head: nn.Linear,
        on_step: Callable[[nn.Linear, Tensor | None], None],
    ) -> None:
        self._head = weakref.ref(head)
        self._on_step = on_step
        self._heard = self._failed = False
        self.found_inf: Tensor | None = None  # above 0 if a fused optimizer skipped its last step
        self._unheard_steps = 0
        self.steps = self._known_steps = 0
        self._version = head.weight._version
        self._foreign_moves = 0
        self._handle: RemovableHandle | None
        me = weakref.WeakMethod(self._after_step)

        @eager
        def after_step(stepped: Optimizer, *_: Any) -> None:
            method = me()
            if method is not None:
                method(getattr(stepped, "found_inf", None))

        try:
            self._handle = optimizer.register_step_post_hook(after_step)
        except AttributeError:  # a class that skips Optimizer.__init__ has no hooks
            self._handle = None

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def counts(self) -> bool:
        """Whether steps are counted: not if the optimizer's class has no hooks."""
        return self._handle is not None

    def hear(self) -> None:
        """A gradient came by."""
        self._heard = True

    def overtaken(self, head: nn.Linear) -> bool:
        """Whether the head has moved, time after time, without a step of the optimizer."""
        version = head.weight._version
        if self.steps != self._known_steps:
            self._foreign_moves = 0
        elif version != self._version and self.counts:
            self._foreign_moves += 1
        self._known_steps, self._version = self.steps, version
        return self._foreign_moves >= PATIENCE

    def _measure(self, head: nn.Linear, found_inf: Tensor | None) -> None:
        """Call `on_step`; whatever goes wrong there, the user's step is made and stays made."""
        try:
            self._on_step(head, found_inf)
        except Exception as error:
            if not self._failed:
                self._failed = True
                warnings.warn(
                    "primum: what was done to the gradients before a step (clipping, loss "
                    f"scaling) could not be measured: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _after_step(self, found_inf: Tensor | None) -> None:
        self.steps += 1
        self.found_inf = found_inf
        head = self._head()
        weight = None if head is None else weight_of(head)
        if head is not None and weight is not None:
            self._measure(head, found_inf)
        if self._heard or weight is None or weight.grad is None:
            return
        self._unheard_steps += 1
        if self._unheard_steps == PATIENCE:
            warnings.warn(
                "primum: the optimizer steps on gradients of the head that did not come by here, "
                "so nothing is weighed. If the model was compiled and run before attaching, call "
                "torch.compiler.reset() once after it; if the head's weight is used without "
                "calling the head (as in F.linear(x, head.weight)), call the head",
                RuntimeWarning,
                stacklevel=2,
            )
