"""What a user holds: the hooks on the head, the explicit form, and the life of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.capture import Listener, Pass, nodes_behind
from primum.compat import eager, is_sharded, parameter
from primum.explicit import check_count, check_tensor, weighted_mean
from primum.fallback import guarded
from primum.positions import Call
from primum.ranks import Ranks
from primum.report import StepReport
from primum.summary import summary_of
from primum.weighing import Weighing


class Reducer(Weighing):
    """Reweights each sample's gradient at the head's output; created by `attach` and `observe`.

    If something goes wrong in a step (non-finite values, a head in eval mode, an error in primum),
    its gradients stay plain; the step is counted in `last.fallbacks`, and each kind of problem is
    warned about once. As a context manager it removes itself at the end of the block. Copies and
    pickles of the model do not contain it.

    Attributes:
        enabled: Set to False to pause and to True to continue; read during `backward`.
        head_name: The dotted name of the head.
    """

    def __init__(self, model: nn.Module, head: nn.Linear, **settings: Any) -> None:
        super().__init__(model, head, **settings)
        self.enabled = True
        # The head owns the listener, and that owns us: weak references upwards make no cycle.
        listener = Listener(head, self)
        self._listener = weakref.ref(listener)

    # --- what a user calls ------------------------------------------------------------------------

    @property
    def last(self) -> StepReport | None:
        """The `StepReport` of the last backward pass through the head; None before the first."""
        return self._last

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps the head's weight."""
        return self._owners["weight"]

    @property
    def head(self) -> nn.Linear | None:
        """The layer whose gradients are measured and reweighted; None if the model is gone."""
        return self._head()

    def __repr__(self) -> str:
        head, recipe = self._head(), self._recipe
        shape = "" if head is None else f" ({head.in_features} -> {head.out_features})"
        found = [(name, getattr(recipe, name, None)) for name in ("radius", "max_extra_weight")]
        settings = [f"{name}={value:g}" for name, value in found if value is not None]
        state = "attached" if self._listener else "removed"
        return (
            f"Reducer(head={self.head_name!r}{shape}, "
            f"optimizer={type(self.optimizer).__name__}, "
            f"recipe={recipe.name!r}{', ' * bool(settings)}{', '.join(settings)}, "
            f"per={str(self._per)!r}, apply={self._apply}, {state}, steps={self._monitor.steps}, "
            f"fallbacks={self._monitor.fallbacks.value.tolist()})"  # SYNC: asked for
        )

    def summary(self) -> None:
        """Print a five-line summary of what the weights have done so far. Waits for the device.

        It shows the layer and its optimizer; the share of samples or tokens that the last steps
        harm with and without the weights; the mean extra weight; the time added; and fallbacks
        with their reasons.
        """
        print(self.summary_text())

    def summary_text(self) -> str:
        """Return the lines of `summary`, for a logger."""
        return summary_of(repr(self), list(self._recent), self._monitor)

    def warn_if_bypassed(self, reason: str) -> None:
        """Warn, once, that the loss does not call the head; not if `reason` is empty."""
        if reason:
            self._monitor.warn("bypass", reason)

    def remove(self) -> None:
        """Detach from the model; training continues with plain gradients, and no hook is left."""
        listener = self._listener() if self._listener else None
        if listener is not None:
            listener.remove()
        self._monitor.remove()
        self._rescale.remove()
        if self._output_check is not None:
            self._output_check.remove()
        self._listener = self._last = None
        self._recent.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep plain gradients in backward passes inside the `with` block.

        Use it for passes that train another network through this one, and for gradients that are
        only read: `torch.autograd.grad(loss, parameters)` is otherwise reweighted like training.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, which load with `weights_only=True`."""
        self._skips.settle()
        return {
            "recipe": self._recipe.name,
            "fallbacks": self._monitor.fallbacks.value.clone(),
            "factor": self._rescale.state(),
            "recipe_state": self._recipe.state_dict(),
            "per": str(self._per),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the recipe must be the same."""
        missing = {"recipe", "fallbacks", "recipe_state"} - state.keys()
        if missing:
            raise ValueError(f"not the state_dict of a Reducer: {sorted(missing)} missing")
        if state["recipe"] != self._recipe.name:
            raise ValueError(
                f"this state was saved with recipe={state['recipe']!r}, "
                f"but this Reducer has recipe={self._recipe.name!r}; attach with the saved one"
            )
        self._recipe = self._per.load(state.get("per"), self._recipe)
        self._recipe.load_state_dict(state["recipe_state"])
        self._monitor.fallbacks.load(state["fallbacks"])
        self._rescale.load(state.get("factor"), self._monitor.fallbacks.value.device)
        self._rescale.forget()
        self._monitor.forget()
        self._skips.forget()

    @eager
    def __call__(self, losses: Tensor) -> Tensor:
        """Return the mean of the weighted losses: the explicit form, instead of the hook.

        The gradients are those of `losses.mean().backward()` under the hook. Pass each sample's
        complete loss at its final scale: `losses / k` if gradients accumulate over k batches. A
        second call on losses of the same forward pass uses the same weights. For a compiled model,
        and under `checkpoint(..., use_reentrant=True)`, the plain mean is returned, and the hook
        applies the weights in the backward pass.

        Args:
            losses: One per sample (`reduction="none"`), [B], or per token, [B, T] or [B * T], in
                the order of the head's input; with `per="auto"` the first call decides. Pixels,
                [B, H, W], get their sample's weight.
        """
        check_tensor(losses)
        mean = losses.mean()
        if not (self._active() and mean.requires_grad):
            return mean
        passes = Pass.behind(losses, self)
        if not passes:
            listener = self._listener() if self._listener else None
            weight = parameter(self._head(), "weight")
            frozen = weight is not None and not weight.requires_grad  # it trains something else
            hidden = any("CheckpointFunction" in each.name() for each in nodes_behind(losses, self))
            if frozen or hidden or (listener is not None and listener.compiled):
                return mean
            raise ValueError(
                f"losses do not depend on the head's output ({self.head_name!r}); compute them "
                "from a forward pass that calls it, after attaching and with gradients enabled"
            )
        first = next(iter(passes))
        if not first.weighed:
            gradients = torch.autograd.grad(mean, list(passes.values()), retain_graph=True)
            per = self._per.of_losses(losses, gradients[0])
            check_count(losses, gradients, per)
            self._check_losses(losses, list(passes.values()), per)
            weighted = self._weigh(gradients, list(passes), first.ranks, explicit=True, terms=per)
            extra_weights, report = None, self._last
            if weighted is not None and report is not None:
                extra_weights = report.extra_weights[report.own]
            for each in passes:
                each.weighed, each.extra_weights = True, extra_weights
                each.together = self._shards is not None and first.ranks is not None
                each.together |= report is not None and report.own != slice(None)
        if first.extra_weights is None:
            return mean
        return weighted_mean(losses, first.extra_weights)

    # --- what the listener calls ------------------------------------------------------------------

    @guarded
    def on_forward(self, head: nn.Module, features: Tensor, output: Tensor) -> None:
        """The head ran: register for the gradient of its output."""
        own = self._head()
        if own is None or head is not own:
            self._monitor.warn(
                "copy",
                "gradients stay plain: a copy of the head ran (nn.DataParallel makes one per "
                "device); use DistributedDataParallel",
            )
            return
        weight = parameter(own, "weight")
        if weight is not None and not weight.requires_grad:
            return  # frozen for this pass: it trains something else
        made = Pass(self, own, features, output)
        self.marked = True
        made.ranks = self._ranks(eager=True)
        hook: Callable[[Tensor], Tensor | None] = partial(self._on_gradient, made)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    @eager
    @guarded
    def _on_gradient(self, made: Pass, gradient: Tensor) -> Tensor | None:
        """The gradient arrived: hand on the weighted one. None leaves it as it is."""
        head = self._head()
        weight = parameter(head, "weight")
        replaced = weight is not made.weight and not is_sharded(weight)  # fully_shard does that
        if head is None or replaced or not made.trains_head():
            return None  # a gradient for another purpose, or of other weights
        if made.weighed or made.differentiated:
            self._monitor.passes += 1
            if made.differentiated:
                self._rescale.miss(gradient)  # a gradient of weighted gradients
            else:
                self._account(head, made, gradient)
            return None
        made.differentiated = gradient.requires_grad
        weighted = self._on_arrival(gradient, made, made.ranks)
        made.release()
        return weighted

    @guarded
    def on_compiled(
        self, gradient: Tensor, features: Callable[[], Tensor], training: bool
    ) -> Tensor | None:
        """The same in a compiled graph, which hands over the head's input itself."""
        return self._on_arrival(gradient, Call(features, training), self._ranks(eager=False))

    def _on_arrival(
        self, gradient: Tensor, call: Pass | Call, ranks: Ranks | None
    ) -> Tensor | None:
        self._monitor.passes += 1
        if not self._active():
            self._rescale.miss(gradient)
            return None
        weighted = self._weigh([gradient], [call], ranks)
        return None if weighted is None else weighted[0]
