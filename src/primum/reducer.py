"""What a user holds: hooks on the head, the explicit form, the life of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as eager  # torch.compiler.disable, imported lazily
from torch.optim import Optimizer

from primum.capture import Listener, Pass, weight_of
from primum.ranks import Ranks, Scope
from primum.recipe import Recipe
from primum.report import StepReport
from primum.rescale import Rescale
from primum.watch import Watch
from primum.weigh import rows_of
from primum.weigher import Arrival, Weigher


class Reducer:
    """Weighs each sample's gradient at the head's output; made by `attach` and `observe`.

    Trouble in a step (values that are not finite, a head in eval mode, an error of ours) leaves its
    gradients plain, is counted in `last.fallbacks` and warned about once. Also a context manager:
    leaving the block removes it. In copies and pickles, of a model that holds one, it is None.

    Attributes:
        enabled: Set to False to pause, to True to go on. What counts is its value in `backward`.
    """

    def __init__(
        self,
        head: nn.Linear,
        owners: dict[str, Optimizer],
        recipe: Recipe,
        *,
        apply: bool,
        per: str = "sample",
        scaler: Any = None,
        scope: Scope | None = None,
    ) -> None:
        self.enabled = True
        # The head owns the listener, and that owns us: weak references upwards make no cycle.
        self._head = weakref.ref(head)
        self._scope = scope or Scope("local", None, head)
        self._rescale = Rescale(owners, scaler)
        self._listener = weakref.ref(Listener(head, self._on_pass, self._on_compiled))
        self._watch = Watch(owners["weight"], head, self._rescale.after_step)
        self._removed = False
        self._owners = owners
        self._recipe = recipe
        self._per = per
        self._weigh = Weigher(
            head,
            owners,
            recipe,
            apply=apply,
            per=per,
            scope=self._scope,
            rescale=self._rescale,
            watch=self._watch,
        )

    @property
    def last(self) -> StepReport | None:
        """The `StepReport` of the last backward pass through the head; None before the first."""
        return self._weigh.last

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps the head's weight."""
        return self._owners["weight"]

    def remove(self) -> None:
        """Detach from the model; training goes on plain. Nothing is left behind."""
        listener = self._listener()
        if listener is not None:
            listener.remove()
        self._watch.remove()
        self._removed, self._weigh.last = True, None

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
        self._weigh.rollback.settle()
        factor = self._rescale.measured
        return {
            "recipe": self._recipe.name,
            "fallbacks": self._weigh.trouble.count.clone(),
            "factor": None if factor is None else factor.clone(),
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
        trouble = self._weigh.trouble
        trouble.load(state["fallbacks"])
        factor, device = state.get("factor"), trouble.count.device
        self._rescale.measured = None if factor is None else factor.to(device, copy=True)

    @eager
    def __call__(self, losses: Tensor) -> Tensor:
        """The explicit form: per-sample losses in, the mean of the weighted losses out.

        The gradients are those of `losses.mean().backward()` under the hook. Call it on the whole
        loss of each sample, scaled as it will be: with gradients accumulated over k batches, on
        `losses / k`. A second call on losses of the same forward pass uses the same weights. Of a
        compiled model the plain mean comes back, and the hook weighs it in the backward pass.

        Args:
            losses: One loss per sample (`reduction="none"`). [B]; per token [B, T] or [B * T].
        """
        if losses.dim() != 1 and self._per == "sample":
            raise ValueError(
                f"losses must have one entry per sample, shape [B], got {list(losses.shape)}; "
                'compute them with reduction="none"'
            )
        mean = losses.mean()
        if not (self._active() and mean.requires_grad):
            return mean
        passes = Pass.behind(losses, self)
        if not passes:
            listener = self._listener()
            if listener is not None and listener.compiled:
                return mean
            raise ValueError(
                "losses do not depend on the head's output; compute them from a forward pass that "
                "ran after attaching, with gradients enabled"
            )
        first = next(iter(passes))
        if not first.weighed:
            gradients = torch.autograd.grad(mean, list(passes.values()), retain_graph=True)
            for gradient in gradients:
                if rows_of(gradient, self._per) != losses.numel():
                    raise ValueError(
                        f"the head saw {rows_of(gradient, self._per)} {self._per}s, "
                        f"but there are {losses.numel()} losses"
                    )
            training = all(each.training for each in passes)
            features = [each.features for each in passes]
            weighted = self._weigh(
                Arrival(gradients, features, training, first.ranks, scaled=False)
            )
            extra_weights, report = None, self.last
            if weighted is not None and report is not None:
                extra_weights = report.extra_weights[report.own]
            for each in passes:
                each.weighed, each.extra_weights = True, extra_weights
        if first.extra_weights is None:
            return mean
        return ((1 + first.extra_weights).to(losses.dtype) * losses.flatten()).mean()

    def _ranks(self) -> Ranks | None:
        ranks = self._scope.ranks()
        alone = self._scope.why_alone() if ranks is None else None
        if alone is not None:
            self._weigh.trouble.warn(*alone)
        return ranks

    def _active(self) -> bool:
        return self.enabled and not self._removed

    def _on_pass(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        """The head ran forward: wait for the gradient of its output."""
        own = self._head()
        if own is None or head is not own:
            self._weigh.trouble.warn(
                "copy",
                "gradients stay plain: a copy of the head ran, as nn.DataParallel makes one for "
                "each device; use DistributedDataParallel",
            )
            return
        made = Pass(self, own, features, output)
        made.ranks = self._ranks()
        hook: Callable[[Tensor], Tensor | None] = partial(self._on_gradient, made)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    @eager
    def _on_gradient(self, waiting: Pass, gradient: Tensor) -> Tensor | None:
        """The gradient arrived: hand on the weighted one. None leaves it as it is."""
        head = self._head()
        if head is None or weight_of(head) is not waiting.weight or not waiting.trains_head():
            return None  # a gradient for another purpose, or of other weights
        if waiting.weighed:
            self._watch.hear()
            return None
        weighted = self._on_arrival(gradient, waiting.features, waiting.training, waiting.ranks)
        waiting.release()
        return weighted

    def _on_compiled(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool
    ) -> Tensor | None:
        """The same in a compiled graph, which hands over the head's input itself."""
        return self._on_arrival(gradient, features, training, self._ranks())

    def _on_arrival(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool, ranks: Ranks | None
    ) -> Tensor | None:
        """A gradient that will train the head."""
        self._watch.hear()
        if not self._active():
            self._rescale.miss()
            return None
        weighted = self._weigh(Arrival([gradient], [features], training, ranks, scaled=True))
        return None if weighted is None else weighted[0]
