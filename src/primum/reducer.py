"""The only orchestrator: capture -> update -> problem -> solve -> weighted gradient."""

from __future__ import annotations

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
from primum.problem import Evidence, Solution
from primum.recipe import Recipe
from primum.report import StepReport
from primum.rescale import Rescale, Rollback
from primum.trouble import Trouble
from primum.watch import Watch
from primum.weigh import Captured, rows_of, samples, times, weigh


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
        per: str = "sample",
        scaler: Any = None,
    ) -> None:
        self.enabled = True
        self.last: StepReport | None = None
        # The head owns the listener, and that owns us: weak references upwards make no cycle.
        self._head = weakref.ref(head)
        self._rescale = Rescale(owners, scaler)
        self._listener = weakref.ref(Listener(head, self._on_pass, self._on_arrival))
        self._watch = Watch(owners["weight"], head, self._rescale.after_step)
        self._rollback = Rollback(recipe, self._watch, scaler)
        self._removed = False
        self._owners = owners
        self._recipe = recipe
        self._apply = apply
        self._per = per
        self._trouble = Trouble(head.weight.device)

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
        self._rollback.settle()
        factor = self._rescale.measured
        return {
            "recipe": self._recipe.name,
            "fallbacks": self._trouble.count.clone(),
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
        self._trouble.load(state["fallbacks"])
        factor, device = state.get("factor"), self._trouble.count.device
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
            weighted = self._weigh(
                [each.features for each in passes], gradients, training, scaled=False
            )
            extra_weights = None
            if weighted is not None and self.last is not None:
                extra_weights = self.last.extra_weights
            for each in passes:
                each.weighed, each.extra_weights = True, extra_weights
        if first.extra_weights is None:
            return mean
        return ((1 + first.extra_weights).to(losses.dtype) * losses.flatten()).mean()

    def _active(self) -> bool:
        return self.enabled and not self._removed

    def _on_pass(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        """The head ran forward: wait for the gradient of its output."""
        own = self._head()
        if own is None or head is not own:
            self._trouble.warn(
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
        if waiting.weighed:
            self._watch.hear()
            return None
        handed_on = self._on_arrival(gradient, waiting.features, waiting.training)
        waiting.release()
        return handed_on

    def _on_arrival(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool
    ) -> Tensor | None:
        """A gradient that will train the head: hand on the weighted one, or None."""
        self._watch.hear()
        if not self._active():
            self._rescale.miss()
            return None
        handed_on = self._weigh([features], [gradient], training, scaled=True)
        return None if handed_on is None else handed_on[0]

    def _weigh(
        self,
        features: Sequence[Callable[[], Tensor]],
        gradients: Sequence[Tensor],
        training: bool,
        *,
        scaled: bool,
    ) -> list[Tensor] | None:
        """The gradients times `1 + w`, row by row; None leaves them plain.

        `scaled` says whether a GradScaler's scale is in them.
        """
        try:
            head = self._ready(training)
            inputs = [each() for each in features]
            with torch.no_grad(), torch.autocast(gradients[0].device.type, enabled=False):
                self._rollback.settle()
                unscale = self._rescale.unscale(gradients[0])
                captured = Captured(
                    samples(inputs, self._per),
                    samples(gradients, self._per),
                    unscale=unscale if scaled else None,
                    before=unscale,
                    factor=self._rescale.factor,
                )
                drift, solution = weigh(head, self._owners, captured, self._recipe)
                weighted = list(gradients)
                if self._apply:
                    weighted = times(gradients, solution.extra_weights, self._per)
                for each, own in zip(weighted, inputs, strict=True):
                    self._rescale.expect(each, own, unscale if scaled else None)
        except Hindrance as hindrance:
            self._fall_back(gradients[0], str(hindrance), kind=str(hindrance))
            return None
        except Exception as error:  # a training run never dies because of us
            self._fall_back(gradients[0], f"{type(error).__name__}: {error}", kind="error")
            return None
        if self._rescale.scaler is None:  # with one, such a step is skipped: all in order
            self._trouble.maybe(solution.objective == torch.inf)
        self.last = StepReport(
            solution=solution,
            drift=drift,
            fallbacks=self._trouble.count,
            applied=self._apply,
            reason="" if self._apply else "observe",
        )
        return weighted if self._apply else None

    def _ready(self, training: bool) -> nn.Linear:
        """The head, if there is any sense in predicting its next step."""
        head = self._head()
        if head is None:
            raise Hindrance("the model is gone")
        if not training:
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

    def _fall_back(self, gradient: Tensor, reason: str, kind: str) -> None:
        self._rescale.miss()
        self._trouble.step(kind, reason)
        unknown = torch.full((rows_of(gradient, self._per),), torch.nan, device=gradient.device)
        evidence = Evidence(lower_bound=unknown.sum(), drift_after=unknown)
        self.last = StepReport(
            solution=Solution(torch.zeros_like(unknown), unknown.sum(), 0, evidence),
            drift=unknown,
            fallbacks=self._trouble.count,
            applied=False,
            reason=reason,
        )
