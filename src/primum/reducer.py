"""What a user holds: the engine of an attached head, its reports, and the life of its hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.guards.gradient_scale import MeasuredScale
from primum.guards.steps import StepWatch
from primum.guards.summary import Recent, summary_of
from primum.guards.watchers import Discards, Stopwatch
from primum.hooks.explicit import weighted_loss
from primum.hooks.head_hook import HeadHook
from primum.hooks.private import eager
from primum.kernel.engine import Engine
from primum.kernel.report import StepReport
from primum.tokens.layout import CHOICES, Granularity

if TYPE_CHECKING:
    from primum.diagnostics.self_check import SelfCheck


class Reducer:
    """Reweights each sample's gradient at the head's output; created by `attach` and `observe`.

    If anything fails in a step (non-finite values, an error in primum), the step falls back to
    plain gradients; it is counted in `last.fallbacks`, and each kind of problem is warned about
    once. As a context manager it removes itself at the end of the block. Copies and pickles of the
    model do not contain it.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Granularity,
        scale: MeasuredScale,
        watch: StepWatch,
        stopwatch: Stopwatch,
    ) -> None:
        self._engine, self._layout, self._scale = engine, layout, scale
        self._watch, self._stopwatch, self._recent = watch, stopwatch, Recent()
        engine.observers.append(self._recent)
        # The head owns the hook, and that owns us: a weak reference upwards makes no cycle.
        self._hook: Callable[[], HeadHook | None] = lambda: None
        self._on_remove: list[Callable[[], None]] = [watch.remove]

    def own(self, hook: HeadHook, *on_remove: Callable[[], None]) -> None:
        """Take over the hook on the head, and what else is to be undone by `remove`."""
        self._hook = weakref.ref(hook)
        self._on_remove += on_remove

    # --- what a user reads ------------------------------------------------------------------------

    @property
    def last(self) -> StepReport | None:
        """The `StepReport` of the last backward pass through the head; None before the first.

        With `radius=0` only passes that follow a read are measured, a hundred for each.
        """
        self._engine.unread = 0
        return self._engine.last

    @property
    def enabled(self) -> bool:
        """Set to False to pause and to True to continue; read during `backward`."""
        hook = self._hook()
        return hook is not None and hook.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        hook = self._hook()
        if hook is not None:
            hook.enabled = value

    @property
    def head_name(self) -> str:
        """The dotted name of the head."""
        return self._engine.head.name

    @property
    def head(self) -> nn.Linear | None:
        """The layer whose gradients are reweighted; None if the model is gone."""
        return self._engine.head.layer if self._engine.head.alive else None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps the head's weight."""
        return self._engine.head.optimizers["weight"]

    def __repr__(self) -> str:
        head, engine = self.head, self._engine
        recipe = engine.recipe
        shape = "" if head is None else " ({1} -> {0})".format(*engine.head.shape)
        radius = recipe.radius_of(self._layout.per)
        settings = "" if radius is None else f", radius={radius:g}"
        most = getattr(recipe, "max_extra_weight", None)
        settings += "" if most is None else f", max_extra_weight={most:g}"
        state = "attached" if self._hook() else "removed"
        return (
            f"Reducer(head={self.head_name!r}{shape}, optimizer={type(self.optimizer).__name__}, "
            f"recipe={recipe.name!r}{settings}, per={str(self._layout)!r}, apply={engine.apply}, "
            f"{state if head is not None else 'the model is gone'}, steps={self._watch.steps}, "
            f"fallbacks={engine.fallbacks.value.tolist()})"  # SYNC: asked for
        )

    def summary(self) -> None:
        """Print a five-line summary of what the weights have done so far. Waits for the device.

        It shows the head and its optimizer; the share of samples or tokens that the last steps
        harm with and without the weights; the mean extra weight; the time added; and fallbacks
        with their reasons.
        """
        print(self.summary_text())

    def summary_text(self) -> str:
        """Return the lines of `summary`, for a logger."""
        return summary_of(repr(self), self._recent, self._engine, self._watch, self._stopwatch)

    # --- what a user calls ------------------------------------------------------------------------

    @eager
    def __call__(self, losses: Tensor) -> Tensor:
        """Return the mean of the weighted losses: the explicit form, instead of the hook.

        The gradients are those of `losses.mean().backward()` under the hook, and they are right
        also where several layers make the output, where a sample has several rows of the head
        (choices, pairs), and where the head runs more than once. Pass each sample's complete loss
        at its final scale: `losses / k` if gradients accumulate over k batches. A second call on
        losses of the same forward pass uses the same weights. For a compiled model, and under
        `checkpoint(..., use_reentrant=True)`, the plain mean is returned, and the hook applies the
        weights in the backward pass.

        Args:
            losses: One per sample (`reduction="none"`), [B], or per token, [B, T] or [B * T], in
                the order of the head's input; with `per="auto"` the first call decides. Pixels,
                [B, H, W], get their sample's weight.
        """
        return weighted_loss(self._hook(), losses)

    def check(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> SelfCheck:
        """Compare gradients and predicted step with slow references on one batch; print it.

        The gradients that the hook leaves are compared with those of `mean((1 + w) * losses)`, and
        the head's predicted step with a real one. Works on copies: model, optimizer and random
        numbers stay as they are. Run it once with your own loss: an error means that the loss
        depends on the rows of the head in a way that the hook cannot see; use the explicit form.

        Args:
            loss_fn: From the model and the batch to one loss per sample or token.
            batch: Passed on to `loss_fn`.

        Examples:
            >>> def losses(model, batch):
            ...     inputs, labels = batch
            ...     return nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            >>> reducer.check(losses, (inputs, labels)).ok
            True
        """
        from primum.diagnostics.self_check import self_check  # imports torch.func and more

        model = self._watch.model
        if model is None:
            raise RuntimeError("the model no longer exists")
        result = self_check(
            *(model, self.head_name, list(self._engine.head.optimizers.values())),
            *(self._engine.recipe, self._layout.per if self._layout.settled else "auto"),
            *(loss_fn, batch),
        )
        print(result)
        return result

    def remove(self) -> None:
        """Detach from the model; training continues with plain gradients, and no hook is left."""
        hook = self._hook()
        if hook is not None:
            hook.remove()
        while self._on_remove:
            self._on_remove.pop()()
        self._hook = lambda: None
        self._engine.last = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep plain gradients in backward passes inside the `with` block.

        Use it for passes that train another network through this one, and for gradients that are
        not followed by a step: `torch.autograd.grad(loss, parameters)` is otherwise reweighted.
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

    def warn_if_bypassed(self, reason: str) -> None:
        """Warn, once, that the loss does not call the head; not if `reason` is empty."""
        if reason:
            self._engine.warn("bypass", reason)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, which load with `weights_only=True`."""
        return {
            "recipe": self._engine.recipe.name,
            "recipe_state": self._engine.recipe.state_dict(),
            "fallbacks": self._engine.fallbacks.value.clone(),
            "factors": self._scale.state_dict(),
            "per": str(self._layout),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the recipe must be the same."""
        _check_state(state, self._engine.recipe.name)
        self._engine.recipe.load_state_dict(state["recipe_state"])
        self._layout.load(state["per"])
        self._engine.fallbacks.load(state["fallbacks"])
        self._scale.load_state_dict(state["factors"])
        for each in self._engine.observers:
            if isinstance(each, Discards):
                each.forget()


def _check_state(state: Any, recipe: str) -> None:
    """Raise one clear error, before anything is loaded, if this is no state of a `Reducer`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"not the state_dict of a Reducer: a {type(state).__name__}")
    kinds = {
        "recipe": str,
        "recipe_state": Mapping,
        "fallbacks": Tensor,
        "factors": Mapping,
        "per": str,
    }
    wrong = sorted(name for name, kind in kinds.items() if not isinstance(state.get(name), kind))
    if not wrong:
        wrong += [] if state["per"] in CHOICES else ["per"]
        whole = state["fallbacks"].numel() == 1
        wrong += [] if whole else ["fallbacks"]
        factors = state["factors"].items()
        if any(n not in ("weight", "bias") or not isinstance(f, Tensor) for n, f in factors):
            wrong.append("factors")
    if wrong:
        raise ValueError(f"not the state_dict of a Reducer: {', '.join(wrong)} missing or wrong")
    if state["recipe"] != recipe:
        raise ValueError(
            f"this state was saved with recipe={state['recipe']!r}, but this Reducer has "
            f"recipe={recipe!r}; attach with the saved one"
        )
