"""One backward pass, from gradients that arrive to gradients that are handed on."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from primum.capture import Listener, Pass, reweight, rows_of, samples
from primum.compat import backward_id, no_autocast, parameter
from primum.distributed import weigh_together
from primum.explicit import check_row_order
from primum.fallback import Plain, check_several
from primum.monitor import Monitor
from primum.output_check import OutputCheck
from primum.pipeline import Captured, weigh
from primum.positions import Call, Per
from primum.problem import Evidence, Solution
from primum.ranks import Meeting, Ranks, Scope, meet
from primum.recipe import Recipe
from primum.refused import why_lost
from primum.report import StepReport
from primum.rescale import Rescale, shared_weight
from primum.shards import Shards
from primum.skips import Skips
from primum.update import has_gradients
from primum.ways import way_for

RECENT = 10  # reports kept for the summary


class Weighing:
    """All state of a `Reducer`, and what it does in one backward pass.

    A training run never dies because of us: whatever goes wrong ends in a plain step that is
    counted. But an error of the process group is the run's own, and raised.

    Args:
        model: As passed to `attach`.
        head: The layer.
        owners: The optimizers of its "weight" and, if one holds it, "bias".
        recipe: From a step's Gram operator and drift to extra weights.
        per: What gets a weight of its own.
        scaler: The loop's GradScaler, or None.
        scope: The ranks that solve together.
        name: The head's.
        check_output: Whether to check that the head's output reaches the model's.
        shards: Of a head that is split over ranks; None if it is whole.
    """

    enabled: bool
    _listener: weakref.ref[Listener] | None

    def __init__(
        self,
        model: nn.Module,
        head: nn.Linear,
        *,
        owners: dict[str, Optimizer],
        recipe: Recipe,
        per: Per,
        scaler: Any,
        scope: Scope,
        name: str,
        check_output: bool = False,
        shards: Shards | None = None,
    ) -> None:
        self.head_name = name
        self.marked = False  # whether the head has run in eager mode, for the `OutputCheck`
        self._checked = False
        self._last: StepReport | None = None
        self._recent: deque[StepReport] = deque(maxlen=RECENT)
        self._head, self._model = weakref.ref(head), weakref.ref(model)
        self._owners, self._recipe, self._scope = owners, recipe, scope
        self._apply, self._per, self._shards = True, per, shards
        by_bias, shared = owners.get("bias") is owners["weight"], shared_weight(model, head)
        self._rescale = Rescale(scaler, by_bias=by_bias, shared=shared)
        optimizer, after_step, weight = owners["weight"], self._rescale.after_step, None
        if shards is not None:
            after_step, weight = shards.after_step(after_step), shards.weight
        self._monitor = Monitor(model, head, name, optimizer, after_step, weight)
        self._backward: int | None = -1  # the backward pass of the last arrival
        self._skips = Skips(recipe, self._rescale, self._monitor)
        warn = partial(self._monitor.warn, "output")
        self._output_check = None
        if check_output:
            self._output_check = OutputCheck(model, weakref.ref(self), name, warn)

    def _active(self) -> bool:
        return self.enabled and self._listener is not None

    def _ranks(self, *, eager: bool) -> Ranks | None:
        ranks = self._scope.ranks(eager=eager)
        alone = self._scope.why_alone() if ranks is None else None
        if alone is not None:
            self._monitor.warn(*alone)
        return ranks

    def _check_losses(self, losses: Tensor, calls: list[GradientEdge], per: str) -> None:
        """In the explicit form, once: refuse losses in another order than the head's rows."""
        if not self._checked:
            self._checked = True
            check_row_order(losses, calls, per)

    def _weigh(
        self,
        gradients: Sequence[Tensor],
        calls: Sequence[Pass | Call],
        ranks: Ranks | None,
        *,
        explicit: bool = False,
        terms: str | None = None,
    ) -> list[Tensor] | None:
        """The gradients times `1 + w`, row by row; None leaves them plain.

        `gradients` arrived at the head's output, one for each of the `calls` that are weighed in
        one. In the `explicit` form they come before backward, and unscaled.
        `terms` is what the loss is known to have terms for, "sample" or "token".
        """
        began = time.perf_counter()
        with torch.no_grad(), no_autocast(gradients[0].device.type):
            captured = self._prepare(gradients, calls, explicit, terms)
            per = self._per.now
            try:
                meeting, votes = None, [self._per.vote]
                if ranks is not None:  # also if there is trouble here: the others wait
                    here = captured.features if isinstance(captured, Captured) else None
                    meeting, votes = meet(ranks, here, self._waits(), self._per.vote)
                said = ranks is None or ranks.rank == 0
                self._recipe = self._per.settle(votes, self._recipe, said=said)
                if isinstance(captured, Exception):
                    raise captured
                if ranks is not None and meeting is None:
                    raise Plain("another rank could not compute its weights")
                if self._per.now != per:
                    captured = self._per.regrouped(captured, gradients, calls)
                    meeting = None if meeting is None else meeting.of_tokens(len(gradients))
                weighted = self._solve(
                    gradients, calls, captured, ranks, meeting, explicit=explicit
                )
            except Warning:
                raise  # turned into an error by the user's own filter
            except Exception as error:
                if ranks is not None and ranks.broken:
                    raise
                self._fall_back(gradients[0], error)
                return None
        self._monitor.spend(time.perf_counter() - began)
        if weighted is not None and self._last is not None:
            radius, last = getattr(self._recipe, "radius", None), self._last
            sequences, per = gradients[0].dim() > 2, self._per.now
            self._monitor.effect.add(last.extra_weights, last.drift, per, radius, sequences)
            if not explicit:
                self._monitor.weighed(last.objective, last.drift)
        return weighted

    def _prepare(
        self,
        gradients: Sequence[Tensor],
        calls: Sequence[Pass | Call],
        explicit: bool,
        terms: str | None,
    ) -> Captured | Exception:
        """What this rank has, or why it has nothing."""
        try:
            head = self._check(all(each.training for each in calls))
            if gradients[0].is_nested:
                raise Plain("the head ran on a nested tensor, which is not supported; pad it")
            self._skips.settle()
            if not explicit:
                self._begin(head, several=rows_of(gradients[0], self._per.now) > 1)
            self._per.look(gradients, terms)
            unscale = self._rescale.unscale(gradients[0])
            inputs = samples([each.features() for each in calls], self._per.now)
            if inputs.shape[-1] != head.in_features:
                raise Plain(
                    f"the head's first argument has {inputs.shape[-1]} features, not "
                    f"{head.in_features}; pass the head's input as its first argument"
                )
            adds = None if explicit else calls[0].accumulator
            return Captured(
                inputs,
                samples(gradients, self._per.now),
                unscale=None if explicit else unscale,
                before=unscale,
                factor=self._rescale.factor,
                accumulated=0.0 if self._monitor.replaced(head.weight.grad, adds) else None,
                tokens=self._per.now == "token",
            )
        except Warning:
            raise
        except Exception as error:
            return error

    def _check(self, training: bool) -> nn.Linear:
        """The head, if it makes sense to predict its next step."""
        head = self._head()
        if head is None:
            raise Plain("the model no longer exists")
        if not training:
            raise Plain("the head ran in eval mode; call model.train() before training")
        weight = parameter(head, "weight")
        if weight is None:
            raise Plain("the head's weight is now computed from other parameters; call .remove()")
        if not weight.requires_grad:
            raise Plain("the head is now frozen; unfreeze it or call .remove()")
        if self._shards is not None:
            lost = self._shards.trouble()
        else:
            lost = why_lost(self._model(), weight, self._owners["weight"])
        if lost:
            raise Plain(lost)
        if self._monitor.overtaken():
            raise Plain(
                "the head's weight is not updated by the optimizer passed to attach (was it "
                "rebuilt?); call .remove() and attach again with the one that trains it"
            )
        return head

    def _begin(self, head: nn.Linear, *, several: bool = True) -> None:
        """At the first arrival of a backward pass: were earlier gradients used, kept or dropped?"""
        task = backward_id()
        again = task is not None and task == self._backward
        if several:  # not states that come one by one: there is nothing to trade off
            self._monitor.arrived(again=again)
        if again:
            return
        self._backward = task
        if task is None or not (self._monitor.pending or self._rescale.expects):
            return
        if self._shards is not None:
            kept = self._shards.kept()
        else:
            kept = None if head.weight.grad is None else head.weight.grad.norm() != 0
        self._monitor.settle(kept)
        self._rescale.forget(kept)

    @torch.no_grad()
    def _account(self, head: nn.Linear, made: Pass, gradient: Tensor) -> None:
        """Bookkeeping of the explicit form, once its weighted gradient arrives."""
        self._begin(head)
        if self._backward is not None:
            mean = self._mean(made.ranks) if made.together else None
            unscale = self._rescale.unscale(gradient)
            self._rescale.expect(gradient, made.features(), unscale, mean)
        if made.extra_weights is not None and self._last is not None:
            self._monitor.weighed(self._last.objective, self._last.drift)

    def _solve(
        self,
        gradients: Sequence[Tensor],
        calls: Sequence[Pass | Call],
        captured: Captured,
        ranks: Ranks | None,
        meeting: Meeting | None,
        *,
        explicit: bool,
    ) -> list[Tensor] | None:
        head = self._head()
        assert head is not None  # as checked before
        way, own_rows = None, slice(None)
        expects = self._backward is not None and not explicit  # there, once the gradient arrives
        if ranks is not None and meeting is not None:
            given = ranks, meeting, captured, self._recipe, self._owners
            holders = None if self._shards is None else self._shards.holders
            way = way_for(self._scope.name, holders, *given, warn=self._monitor.warn)
        if way is None:
            check_several(len(captured.features))
        if self._shards is None and way is None:
            ranks = None
            drift, solution = weigh(head, self._owners, captured, self._recipe)
            weighted = self._weighted(gradients, solution.extra_weights)
        else:
            try:
                whole = head if self._shards is None else self._shards
                drift, solution = weigh_together(
                    ranks, meeting, way, whole, self._owners, captured, self._recipe
                )
                own_rows = slice(None) if meeting is None or way == "local" else meeting.own
                weighted = self._weighted(gradients, solution.extra_weights[own_rows])
            except Exception:
                if ranks is not None and not ranks.broken and expects:  # the others go on
                    for each in gradients:
                        self._rescale.miss(each, self._mean(ranks))
                raise
        if expects:
            mean = self._mean(ranks)
            for each, call in zip(weighted, calls, strict=True):
                self._rescale.expect(each, call.features(), captured.unscale, mean)
        if self._rescale.scaler is None:  # with one, such a step is skipped and expected
            self._monitor.not_finite(solution.objective)
        self._report(drift, solution, own=own_rows)
        return None if weighted[0] is gradients[0] else weighted

    def _waits(self) -> bool:
        """Whether this rank has gradients of earlier passes that were not reduced over ranks."""
        if self._shards is not None:
            return bool(self._shards.unreduced())
        return has_gradients(self._head(), self._owners)

    def _mean(self, ranks: Ranks | None) -> Callable[[Tensor], Tensor] | None:
        """How gradients are averaged over the ranks that solve together."""
        if ranks is None:
            return None
        return ranks.mean if self._shards is None else self._shards.mean

    def _weighted(self, gradients: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        # With radius 0 as well: times 1 keeps the values but not the strides of expanded gradients,
        # and torch sums those in another order.
        if not self._apply or getattr(self._recipe, "radius", None) == 0:
            return list(gradients)
        # Under `create_graph=True` the weighted gradient is a function of the gradient.
        with torch.set_grad_enabled(any(each.requires_grad for each in gradients)):
            return reweight(gradients, weights, self._per.now)

    def _report(
        self, drift: Tensor, solution: Solution, *, own: slice | None = None, why: str = ""
    ) -> None:
        weighed = self._apply and not why
        self._last = StepReport(
            solution=solution,
            drift=drift,
            fallbacks=self._monitor.fallbacks.value,
            discarded=self._monitor.discarded.value,
            weighed=weighed,
            why=why or ("" if weighed else "observe"),
            own=own or slice(None),
            per=self._per.now,
        )
        self._recent.append(self._last)

    def _fall_back(self, gradient: Tensor, error: Exception) -> None:
        self._rescale.miss(gradient)
        if isinstance(error, Plain):
            kind = reason = str(error)
        else:
            kind, reason = "error", f"{type(error).__name__}: {error}"
        if isinstance(error, Plain) and not error.counted:
            self._monitor.warn(kind, reason)
        else:
            self._monitor.fall_back(kind, reason)
        rows = rows_of(gradient, self._per.now)
        unknown = torch.full((rows,), torch.nan, device=gradient.device)
        value = torch.full((), torch.nan, device=gradient.device)
        evidence = Evidence(lower_bound=value, drift_after=unknown)
        solution = Solution(torch.zeros_like(unknown), value, 0, evidence)
        self._report(unknown, solution, why=reason)
