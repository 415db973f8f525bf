"""One backward pass, from gradients that arrive to gradients that are handed on.

`Engine.reweight` is the only control flow. Everything optional plugs in at a seam: a `Layout` says
what a row is, a `Builder` makes the problem, a `Recipe` solves it, `Observer`s watch. Sources call
the engine: the hook on the head, the operation in compiled graphs, the explicit form.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from primum.kernel.batch import HeadBatch, count_rows, reweight, rows_of
from primum.kernel.builder import Builder
from primum.kernel.head import Head, Plain
from primum.kernel.problem import Solution, StepProblem
from primum.kernel.recipe import Recipe
from primum.kernel.report import StepReport
from primum.kernel.warn import Count, Once

_log = logging.getLogger("primum")

READ_FOR = 100  # Passes that are measured at radius 0 after a report was read.


class Call(Protocol):
    """A call of the head whose gradient has arrived."""

    peers: Any  # the processes that may solve together in this pass, for the builder
    before: float | None  # 0 if the coming gradient replaces what is in `.grad`

    def inputs(self) -> Tensor:
        """What the head was called with."""


class Layout:
    """What a row is, and so what is reweighted: here, samples. `per` says which."""

    per = "sample"

    def look(self, grads: Sequence[Tensor], terms: str | None) -> int:
        """This process's vote on what a row is; `terms` is what the loss has terms for."""
        return 0

    def terms_of(self, losses: Tensor, grad: Tensor) -> str:
        """What losses of the explicit form have terms for, "sample" or "token"."""
        return self.per

    def settle(self, votes: Sequence[int], recipe: Recipe) -> None:
        """Decide from the votes of all processes, alike on each."""


class Observer:
    """What watches: guards and measurements. Raise `Plain` to keep a pass plain."""

    def on_arrival(self, grad: Tensor, again: bool) -> None:
        """A gradient has arrived at the head's output, in a pass that trains the head.

        `again` if it is not the first of its backward pass.
        """

    def before_solving(self, explicit: bool) -> None:
        """The weights of a pass are about to be computed; `explicit` in the explicit form."""

    def on_solution(self, report: StepReport) -> None:
        """The weights of a pass were computed."""

    def on_weighted(self, report: StepReport) -> None:
        """A backward pass has handed on gradients with these weights."""


@dataclass
class Engine:
    """Computes the weights of each backward pass and applies them.

    A training run never dies because of us: whatever goes wrong ends in a plain step that is
    counted. But an error of the process group is the run's own, and raised by the builder.

    Attributes:
        apply: Whether gradients are changed, or only measured.
        last: The report of the last pass.
        reasons: Why passes fell back to plain gradients, and how often, as far as the host knows.
        passes: Backward passes through the head since attaching, whatever became of them.
        unread: Passes since a report was last read.
    """

    head: Head
    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    builder: Builder = field(default_factory=Builder)
    observers: list[Observer] = field(default_factory=list)
    apply: bool = True
    last: StepReport | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    unread: int = READ_FOR - 1

    def __post_init__(self) -> None:
        device = self.head.layer.weight.device
        self.fallbacks, self.discarded = Count(device), Count(device)
        self.warn = Once()

    @property
    def plain(self) -> bool:
        """Whether gradients stay as they are: when measuring, and at radius 0.

        Times 1 keeps the values of expanded gradients but not their strides, and torch sums those
        in another order.
        """
        return not self.apply or self.recipe.radius == 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: plain training, and nobody has read a report lately."""
        return self.apply and self.recipe.radius == 0 and self.unread >= READ_FOR

    def reweight(
        self, calls: Sequence[Call], grads: Sequence[Tensor], *, terms: str | None = None
    ) -> list[Tensor] | None:
        """Gradients at the head's output -> times `1 + w`, row by row; None leaves them plain.

        Args:
            calls: Of the head, which count as one.
            grads: The gradient at the output of each.
            terms: In the explicit form, what the loss has terms for, "sample" or "token": the
                gradients come before backward and without loss scaling.
        """
        self.unread += 1
        with torch.no_grad(), _no_autocast(grads[0].device.type):
            self.builder.begin(None if self.plain and self.apply else calls[0].peers)
            try:
                batch = self._batch(calls, grads, terms)
                problem = self.builder.build(self.head, batch, self.recipe)
                problem, solution = self.builder.finish(problem, self.recipe(problem))
                own = solution.extra_weights[problem.own]
                weighted = None if self.plain else self._weighted(grads, own)
            except Warning:
                raise  # turned into an error by the user's own filter
            except Exception as error:
                if not self.builder.broken:
                    self.builder.abort()
                if self.builder.broken:
                    raise
                self.fall_back(grads[0], error)
                return None
            self._report(problem, solution)
        return weighted

    def _batch(
        self, calls: Sequence[Call], grads: Sequence[Tensor], terms: str | None
    ) -> HeadBatch:
        """What arrived, by rows, once all processes agree on what a row is."""
        if grads[0].is_nested:
            raise Plain("the head ran on a nested tensor, which is not supported; pad it")
        self.head.check()
        for each in self.observers:
            each.before_solving(terms is not None)
        inputs = [each.inputs() for each in calls]
        width = self.head.shape[1]
        if inputs[0].shape[-1] != width:
            raise Plain(
                f"the head's first argument has {inputs[0].shape[-1]} features, not {width}; pass "
                "the head's input as its first argument"
            )
        vote = self.layout.look(grads, terms)
        self.layout.settle(self.builder.agree(self.head, inputs, vote), self.recipe)
        per = self.layout.per
        unscale = self.head.scale.unscale(grads[0]) if terms is None else None
        before = calls[0].before
        return HeadBatch(rows_of(inputs, per), rows_of(grads, per), per, unscale, before)

    def _weighted(self, grads: Sequence[Tensor], extra_weights: Tensor) -> list[Tensor]:
        # Under `create_graph=True` the weighted gradient is a function of the gradient.
        with torch.set_grad_enabled(any(each.requires_grad for each in grads)):
            return reweight(grads, extra_weights, self.layout.per)

    def _report(self, problem: StepProblem, solution: Solution) -> None:
        self.last = StepReport(
            solution,
            problem.drift,
            self.fallbacks.value,
            self.discarded.value,
            weighted=self.apply,
            why="" if self.apply else "observe",
            own=problem.own,
            per=problem.per,
            approximate=problem.approximate,
        )
        for each in self.observers:
            each.on_solution(self.last)

    @torch.no_grad()
    def arrived(self, grad: Tensor, *, again: bool) -> None:
        """A gradient has arrived at the head's output, to be weighted or not."""
        for each in self.observers:
            try:
                each.on_arrival(grad, again)
            except Warning:
                raise
            except Exception as error:  # a guard that fails must not stop the run, nor the weights
                name = type(each).__name__
                self.warn(name, f"{name} failed: {type(error).__name__}: {error}")

    def handed_on(self) -> None:
        """A backward pass has handed on the gradients that were weighted last."""
        if self.last is not None and not self.plain:
            for each in self.observers:
                each.on_weighted(self.last)

    def fall_back(self, grad: Tensor, error: Exception) -> None:
        """Count a pass that stays plain, say why once, and report it as unknown."""
        plain = isinstance(error, Plain)
        reason = str(error) if plain else f"{type(error).__name__}: {error}"
        kind = reason if plain else "error"
        if isinstance(error, Plain) and not error.counted:
            _log.info("primum: %s", reason)
        else:
            self.fallbacks.add(1)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            self.warn(kind, f"fell back to plain gradients: {reason}")
        rows = count_rows(grad, self.layout.per)
        unknown = torch.full((rows,), torch.nan, device=grad.device)
        value = torch.full((), torch.nan, device=grad.device)
        self.last = StepReport(
            Solution(torch.zeros_like(unknown), value, value, unknown),
            unknown,
            self.fallbacks.value,
            self.discarded.value,
            weighted=False,
            why=reason,
            per=self.layout.per,
        )


def weak(engine: Engine) -> Engine:
    """The engine as its guards keep it: without a cycle, so that a model is freed at once."""
    proxy: Any = weakref.proxy(engine)
    return proxy  # type: ignore[no-any-return]


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """A block without autocast; entering it costs time, so only where it is on."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
