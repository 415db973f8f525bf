"""The only orchestrator: capture -> update -> problem -> solve -> weighted gradient."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as eager  # torch.compiler.disable, imported lazily
from torch.optim import Optimizer

from primum.capture import Listener, Pass, weight_of
from primum.gram import Head
from primum.problem import Evidence, Solution
from primum.recipe import Recipe
from primum.report import StepReport
from primum.update import group_of, predict_head
from primum.watch import Watch


class Hindrance(RuntimeError):
    """Why a step is left plain although nothing broke."""


class Reducer:
    """Weighs each sample's gradient at the head's output; made by `attach` and `observe`.

    Trouble in a step (values that are not finite, a head in eval mode, an error of ours) leaves its
    gradients plain, is counted in `last.fallbacks` and warned about once. Also a context manager:
    leaving the block removes it. In copies and pickles, of a model that holds one, it is None.

    Attributes:
        enabled: Set to False to pause, to True to go on. What counts is its value in `backward`.
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
        self.enabled = True
        self.last: StepReport | None = None
        # The head owns the listener, and that owns us: weak references upwards make no cycle.
        self._head = weakref.ref(head)
        self._listener = weakref.ref(Listener(head, self._on_pass))
        self._watch = Watch(owners["weight"], head)
        self._removed = False
        self._owners = owners
        self._recipe = recipe
        self._apply = apply
        self._fallbacks = torch.zeros((), dtype=torch.int64, device=head.weight.device)
        self._mailbox: Tensor | None = None
        self._known_fallbacks = 0
        self._warned: set[str] = set()

    def remove(self) -> None:
        """Detach from the model; training goes on plain. Nothing is left behind."""
        listener = self._listener()
        if listener is not None:
            listener.remove()
        self._watch.remove()
        self._removed, self.last = True, None

    def __enter__(self) -> Reducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: loads with `weights_only=True`."""
        return {
            "recipe": self._recipe.name,
            "fallbacks": self._fallbacks.clone(),
            "recipe_state": self._recipe.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"recipe", "fallbacks", "recipe_state"} - state.keys()
        if missing:
            raise ValueError(f"not a state_dict of a Reducer: {sorted(missing)} missing")
        if state["recipe"] != self._recipe.name:
            raise ValueError(
                f"this state was saved with recipe={state['recipe']!r}, "
                f"but the Reducer runs recipe={self._recipe.name!r}"
            )
        self._recipe.load_state_dict(state["recipe_state"])
        self._fallbacks = state["fallbacks"].to(self._fallbacks.device, copy=True)
        self._known_fallbacks = int(state["fallbacks"])  # SYNC: once, when a run is resumed

    @eager
    def __call__(self, losses: Tensor) -> Tensor:
        """The explicit form: per-sample losses in, the mean of the weighted losses out.

        The gradients are those of `losses.mean().backward()` under the hook. Call it on the whole
        loss of each sample, scaled as it will be: with gradients accumulated over k batches, on
        `losses / k`. A second call on losses of the same forward pass uses the same weights.

        Args:
            losses: One loss per sample (`reduction="none"`). [B].
        """
        if losses.dim() != 1:
            raise ValueError(
                f"losses must have one entry per sample, shape [B], got {list(losses.shape)}; "
                'compute them with reduction="none"'
            )
        mean = losses.mean()
        if not (self._active() and mean.requires_grad):
            return mean
        passes = Pass.behind(losses, self)
        if not passes:
            raise ValueError(
                "losses do not depend on the head's output; compute them from a forward pass that "
                "ran after attaching, with gradients enabled"
            )
        first = next(iter(passes))
        if not first.weighed:
            gradients = torch.autograd.grad(mean, list(passes.values()), retain_graph=True)
            for gradient in gradients:
                if _rows(gradient) != len(losses):
                    raise ValueError(
                        f"the head saw {_rows(gradient)} samples, "
                        f"but there are {len(losses)} losses"
                    )
            extra_weights = self._weigh(list(passes), gradients)
            for each in passes:
                each.weighed, each.extra_weights = True, extra_weights
        if first.extra_weights is None:
            return mean
        return ((1 + first.extra_weights).to(losses.dtype) * losses).mean()

    def _active(self) -> bool:
        return self.enabled and not self._removed

    def _on_pass(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        """The head ran forward: wait for the gradient of its output."""
        own = self._head()
        if own is None or head is not own:
            self._warn(
                "copy",
                "gradients stay plain: a copy of the head ran, as nn.DataParallel makes one for "
                "each device; use DistributedDataParallel",
            )
            return
        hook: Callable[[Tensor], Tensor | None] = partial(
            self._on_gradient, Pass(self, own, features, output)
        )
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    @eager
    def _on_gradient(self, waiting: Pass, gradient: Tensor) -> Tensor | None:
        """The gradient arrived: hand on the weighted one. None leaves it as it is."""
        head = self._head()
        if head is None or weight_of(head) is not waiting.weight or not waiting.trains_head():
            return None  # a gradient for another purpose, or of other weights
        self._watch.hear()
        extra_weights = None
        if self._active() and not waiting.weighed:
            extra_weights = self._weigh([waiting], [gradient])
        waiting.release()
        if extra_weights is None:
            return None
        weights = (1 + extra_weights).to(gradient.dtype)
        return gradient * weights.view(-1, *(1,) * (gradient.dim() - 1))

    def _weigh(self, passes: Sequence[Pass], gradients: Sequence[Tensor]) -> Tensor | None:
        """Extra weights for the rows of the gradients; None leaves them plain. -> [B]."""
        try:
            head = self._ready(passes)
            features = [each.features() for each in passes]
            with torch.no_grad(), torch.autocast(gradients[0].device.type, enabled=False):
                drift, solution = self._solve(head, features, gradients)
        except Hindrance as hindrance:
            self._fall_back(gradients[0], str(hindrance), kind=str(hindrance))
            return None
        except Exception as error:  # a training run never dies because of us
            self._fall_back(gradients[0], f"{type(error).__name__}: {error}", kind="error")
            return None
        self._fallbacks = self._fallbacks + solution.objective.isnan()
        self._warn_of_fallbacks()
        self.last = StepReport(
            solution=solution,
            drift=drift,
            fallbacks=self._fallbacks,
            applied=self._apply,
            reason="" if self._apply else "observe",
        )
        return solution.extra_weights if self._apply else None

    def _ready(self, passes: Sequence[Pass]) -> nn.Linear:
        """The head, if there is any sense in predicting its next step."""
        head = self._head()
        if head is None:
            raise Hindrance("the model is gone")
        if not all(each.training for each in passes):
            raise Hindrance("the head ran in eval mode; call model.train() before training")
        weight = weight_of(head)
        if weight is None:
            raise Hindrance("the head's weight is computed from others now; call .remove()")
        if not weight.requires_grad:
            raise Hindrance("the head is frozen now; unfreeze it or call .remove()")
        if self._watch.overtaken(head):
            raise Hindrance(
                "the head changes, but not by the optimizer given to primum (was it rebuilt?); "
                "call .remove() and attach again with the one that trains it"
            )
        return head

    def _solve(
        self, head: nn.Linear, features: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Tensor, Solution]:
        """Drift and solution of this step's problem. Rows of the first dimension are samples."""
        dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        x, g = _samples(features, dtype), _samples(gradients, dtype)
        # A bias may be frozen later; then it is a constant.
        owners = {k: v for k, v in self._owners.items() if getattr(head, k).requires_grad}
        if "bias" in owners:
            x = nn.functional.pad(x, (0, 1), value=1.0)
        mean_gradient = g.flatten(0, -2).t() @ x.flatten(0, -2)
        update = predict_head(head, owners, mean_gradient)
        if group_of(self._owners["weight"], head.weight).get("maximize", False):
            g = -g  # what is maximised is minus a loss
        seen = Head(x, g, update.gain, has_bias="bias" in owners)
        drift = seen.along(update.step)
        return drift, self._recipe(seen, update, drift)

    def _fall_back(self, gradient: Tensor, reason: str, kind: str) -> None:
        self._fallbacks = self._fallbacks + 1
        self._known_fallbacks += 1
        self._warn(kind, f"plain gradients in a step: {reason}")
        unknown = torch.full((_rows(gradient),), torch.nan, device=gradient.device)
        evidence = Evidence(lower_bound=unknown.sum(), drift_after=unknown)
        self.last = StepReport(
            solution=Solution(torch.zeros_like(unknown), unknown.sum(), 0, evidence),
            drift=unknown,
            fallbacks=self._fallbacks,
            applied=False,
            reason=reason,
        )

    def _warn_of_fallbacks(self) -> None:
        """Warn when the device has counted a fallback: late if it lags behind, but never waiting.

        On the CPU the count is read where it is. From elsewhere it is copied into pinned memory
        without waiting, and what has arrived there by now is read.
        """
        count = self._fallbacks
        if count.device.type != "cpu":
            if self._mailbox is None:
                self._mailbox = torch.zeros((), dtype=torch.int64, pin_memory=count.is_cuda)
            self._mailbox.copy_(count, non_blocking=True)
            count = self._mailbox
        if type(count) is Tensor:  # a fake tensor has no value to read
            seen: Any = count.tolist()  # host memory: not a sync
            if seen > self._known_fallbacks:
                self._warn("values", "plain gradients in a step: its values were not finite")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"primum: {message}", RuntimeWarning, stacklevel=2)


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() > 1 else 1


def _samples(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[d] -> [1, d]; [B, d] and [B, T, d] as they are; [B, H, W, d] -> [B, H * W, d].

    Several calls of the head for the same samples count as positions of one: [B, positions, d].
    """
    tensors = [each.to(dtype) for each in tensors]
    tensors = [each.unsqueeze(0) if each.dim() == 1 else each for each in tensors]
    tensors = [each.flatten(1, -2) if each.dim() > 3 else each for each in tensors]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([each.unsqueeze(1) if each.dim() == 2 else each for each in tensors], 1)
