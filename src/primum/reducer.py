"""The only orchestrator: capture -> update -> problem -> solve -> weighted gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.capture import Listener, Pass
from primum.gram import Head
from primum.problem import Problem, Solution
from primum.report import StepReport
from primum.solve import solve
from primum.update import Update, group_of, predict_head


class Recipe(Protocol):
    """From a head, what its optimizer is about to do and the drift, to extra weights. drift [B]."""

    @property
    def name(self) -> str: ...

    def __call__(self, head: Head, update: Update, drift: Tensor) -> Solution: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Primum:
    """The default recipe: the problem in the optimizer's own metric, solved with a certificate."""

    radius: float = 0.2
    max_extra_weight: float = 2.0
    max_iters: int = 20
    name: str = "primum"

    def __post_init__(self) -> None:
        for name in ("radius", "max_extra_weight"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")
        if self.max_extra_weight == 0:
            raise ValueError("max_extra_weight must be > 0, got 0; for plain training use radius=0")
        if self.max_iters != int(self.max_iters) or self.max_iters < 1:
            raise ValueError(f"max_iters must be a whole number >= 1, got {self.max_iters!r}")

    def __call__(self, head: Head, update: Update, drift: Tensor) -> Solution:
        if self.radius == 0:  # nothing to solve: plain training, measured
            harm = drift.clamp_min(0).sum()
            return Solution(torch.zeros_like(drift), harm, harm, 0, drift)
        problem = Problem.of_head(
            head,
            update.step,
            drift,
            radius=self.radius,
            max_extra_weight=self.max_extra_weight,
            products=self.max_iters + 2,
        )
        return solve(problem, self.max_iters)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Reducer:
    """Weighs each sample's gradient at the head's output; made by `attach` and `observe`.

    Trouble in a step (values that are not finite, an error of ours) leaves its gradients plain, is
    counted in `last.fallbacks` and warned about once. Also a context manager: leaving the block
    removes it.

    Attributes:
        enabled: Set to False to pause, to True to go on.
        last: The `StepReport` of the last backward pass through the head; None before the first.
    """

    def __init__(
        self,
        head: nn.Linear,
        owners: dict[str, Optimizer],
        recipe: Recipe,
        *,
        apply: bool,
    ) -> None:
        self.head = head
        self.enabled = True
        self.last: StepReport | None = None
        self._owners = owners
        self._recipe = recipe
        self._apply = apply
        self._pending: Pass | None = None
        self._fallbacks = torch.zeros((), dtype=torch.int64, device=head.weight.device)
        on_host = head.weight.device.type == "cpu"
        self._mailbox = None if on_host else torch.zeros((), dtype=torch.int64).pin_memory()
        self._known_fallbacks = 0
        self._warned: set[str] = set()
        self._listener = Listener(head, self._on_pass)

    def remove(self) -> None:
        """Detach from the model; training goes on plain. Nothing is left behind."""
        self._listener.remove()
        self._pending = self.last = None

    def __enter__(self) -> Reducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: loads with `weights_only=True`."""
        return {
            "recipe": self._recipe.name,
            "fallbacks": self._fallbacks.clone(),
            "recipe_state": self._recipe.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["recipe"] != self._recipe.name:
            raise ValueError(
                f"this state was saved with recipe={state['recipe']!r}, "
                f"but the Reducer runs recipe={self._recipe.name!r}"
            )
        self._fallbacks = state["fallbacks"].to(self._fallbacks.device, copy=True)
        self._known_fallbacks = int(state["fallbacks"])  # SYNC: once, when a run is resumed
        self._recipe.load_state_dict(state["recipe_state"])

    def __call__(self, losses: Tensor) -> Tensor:
        """The explicit form: per-sample losses in, the mean of the weighted losses out.

        Call it between forward and backward, on the losses of the head's last forward pass. The
        gradients are the same as those of `losses.mean().backward()` under the hook.

        Args:
            losses: One loss per sample (`reduction="none"`). [B].
        """
        if losses.dim() != 1:
            raise ValueError(
                f"losses must have one entry per sample, shape [B], got {list(losses.shape)}; "
                'compute them with reduction="none"'
            )
        waiting, self._pending = self._pending, None
        if waiting is None or waiting.edge is None or not losses.requires_grad:
            return losses.mean()
        waiting.weighed = True
        (gradient,) = torch.autograd.grad(
            losses.mean(), (waiting.edge,), retain_graph=True, allow_unused=True
        )
        if gradient is None:
            raise ValueError("losses do not depend on the head's last output")
        if len(gradient) != len(losses):
            raise ValueError(
                f"the head saw {len(gradient)} samples, but there are {len(losses)} losses"
            )
        extra_weights = self._weigh(waiting, gradient)
        if extra_weights is None:
            return losses.mean()
        return ((1 + extra_weights).to(losses.dtype) * losses).mean()

    def _on_pass(self, features: Tensor, output: Tensor) -> None:
        """The head ran forward: wait for the gradient of its output."""
        self._pending = None
        if not self.enabled:
            return
        if not self.head.training:
            self._warn("eval", "gradients stay plain in eval mode; call model.train() first")
            return
        waiting = self._pending = Pass(features, output)
        hook: Callable[[Tensor], Tensor | None] = partial(self._on_gradient, waiting)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, waiting: Pass, gradient: Tensor) -> Tensor | None:
        """The gradient arrived: hand on the weighted one. None leaves it as it is."""
        if waiting is self._pending:
            self._pending = None
        weighing = self.enabled and not waiting.weighed
        extra_weights = self._weigh(waiting, gradient) if weighing else None
        waiting.release()
        if extra_weights is None:
            return None
        weights = (1 + extra_weights).to(gradient.dtype)
        return gradient * weights.view(-1, *(1,) * (gradient.dim() - 1))

    def _weigh(self, waiting: Pass, gradient: Tensor) -> Tensor | None:
        """Extra weights for the rows of `gradient`; None leaves them plain. -> [B]."""
        try:
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                drift, solution = self._solve(waiting.features(), gradient)
        except Exception as error:  # a training run never dies because of us
            self._fallbacks = self._fallbacks + 1
            self._warn("fallback", f"plain gradients in a step: {type(error).__name__}: {error}")
            return None
        self._fallbacks = self._fallbacks + solution.objective.isnan()
        self._warn_of_fallbacks()
        self.last = StepReport(
            extra_weights=solution.extra_weights,
            drift=drift,
            drift_after=solution.drift_after,
            objective=solution.objective,
            lower_bound=solution.lower_bound,
            fallbacks=self._fallbacks,
            applied=self._apply,
        )
        return solution.extra_weights if self._apply else None

    def _solve(self, features: Tensor, gradient: Tensor) -> tuple[Tensor, Solution]:
        """Drift and solution of this step's problem. Rows of the first dimension are samples."""
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        x, g = _samples(features.to(dtype)), _samples(gradient.to(dtype))
        if "bias" in self._owners:
            x = nn.functional.pad(x, (0, 1), value=1.0)
        mean_gradient = g.flatten(0, -2).t() @ x.flatten(0, -2)
        update = predict_head(self.head, self._owners, mean_gradient)
        if group_of(self._owners["weight"], self.head.weight).get("maximize", False):
            g = -g  # what is maximised is minus a loss
        head = Head(x, g, update.gain, has_bias="bias" in self._owners)
        drift = head.along(update.step)
        return drift, self._recipe(head, update, drift)

    def _warn_of_fallbacks(self) -> None:
        """Warn when the device has counted a fallback: late if it lags behind, but never waiting.

        On the CPU the count is read where it is. From elsewhere it is copied into pinned memory
        without waiting, and what has arrived there by now is read.
        """
        count = self._fallbacks
        if self._mailbox is not None:
            self._mailbox.copy_(count, non_blocking=True)
            count = self._mailbox
        if type(count) is Tensor:  # a fake tensor has no value to read
            seen: Any = count.tolist()  # host memory: not a sync
            if seen > self._known_fallbacks:
                self._warn("fallback", "plain gradients in a step: its values were not finite")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"primum: {message}", RuntimeWarning, stacklevel=2)


def _samples(tensor: Tensor) -> Tensor:
    """[d] -> [1, d]; [B, d] and [B, T, d] as they are; [B, H, W, d] -> [B, H * W, d]."""
    if tensor.dim() == 1:
        return tensor.unsqueeze(0)
    return tensor.flatten(1, -2) if tensor.dim() > 3 else tensor
