"""One backward pass, from gradients that arrive to gradients that are handed on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.capture import weight_of
from primum.distributed import choose_way, weigh_together
from primum.problem import Evidence, Solution
from primum.ranks import Meeting, Ranks, Scope, meet
from primum.recipe import Recipe
from primum.report import StepReport
from primum.rescale import Rescale, Rollback
from primum.trouble import Trouble
from primum.update import uniform
from primum.watch import Watch
from primum.weigh import Captured, rows_of, samples, times, weigh


class Hindrance(RuntimeError):
    """Why a step is left plain although nothing broke."""


@dataclass(frozen=True)
class Arrival:
    """Gradients of the head's output, each with the input that belongs to it.

    Attributes:
        gradients: One for each call of the head that is weighed in one go.
        features: The head's inputs, as functions: they may be gone.
        training: Whether the head ran in training mode.
        ranks: That this pass is weighed with; None if it is this one alone.
        scaled: Whether a GradScaler's scale is in the gradients.
    """

    gradients: Sequence[Tensor]
    features: Sequence[Callable[[], Tensor]]
    training: bool
    ranks: Ranks | None
    scaled: bool


class Weigher:
    """Weighs what arrives, and reports on it.

    A training run never dies because of us: whatever goes wrong ends in a plain step that is
    counted. But an error of the process group is the run's own, and raised.
    """

    def __init__(
        self,
        head: nn.Linear,
        owners: dict[str, Optimizer],
        recipe: Recipe,
        *,
        apply: bool,
        per: str,
        scope: Scope,
        rescale: Rescale,
        watch: Watch,
    ) -> None:
        self.last: StepReport | None = None
        self.trouble = Trouble(head.weight.device)
        self.rollback = Rollback(recipe, watch, rescale)
        self._head = weakref.ref(head)
        self._owners, self._recipe = owners, recipe
        self._apply, self._per = apply, per
        self._scope, self._rescale, self._watch = scope, rescale, watch

    def __call__(self, arrival: Arrival) -> list[Tensor] | None:
        """The gradients times `1 + w`, row by row; None leaves them plain."""
        device, ranks = arrival.gradients[0].device, arrival.ranks
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            captured = self._prepare(arrival)
            try:
                meeting = None
                if ranks is not None:  # also if there is trouble here: the others wait
                    features = captured.features if isinstance(captured, Captured) else None
                    meeting = meet(ranks, features, self._accumulates())
                if isinstance(captured, Exception):
                    raise captured
                if ranks is not None and meeting is None:
                    raise Hindrance("another rank could not weigh its part")
                return self._weigh(arrival, captured, ranks, meeting)
            except Exception as error:
                if ranks is not None and ranks.broken:
                    raise
                self._fall_back(arrival.gradients[0], error)
                return None

    def _prepare(self, arrival: Arrival) -> Captured | Exception:
        """What this rank has, or why it has nothing."""
        try:
            head = self._check(arrival.training)
            self.rollback.settle()
            self._rescale.begin(head)
            unscale = self._rescale.unscale(arrival.gradients[0])
            return Captured(
                samples([each() for each in arrival.features], self._per),
                samples(arrival.gradients, self._per),
                unscale=unscale if arrival.scaled else None,
                before=unscale,
                factor=self._rescale.factor,
            )
        except Exception as error:
            return error

    def _weigh(
        self, arrival: Arrival, captured: Captured, ranks: Ranks | None, meeting: Meeting | None
    ) -> list[Tensor] | None:
        head = self._head()
        assert head is not None  # as checked before
        way, own_rows = None, slice(None)
        if ranks is not None and meeting is not None:
            way = self._way(ranks, meeting, captured)
        if ranks is None or meeting is None or way is None:
            ranks = None
            drift, solution = weigh(head, self._owners, captured, self._recipe)
        else:
            own_rows = meeting.own
            try:
                drift, solution = weigh_together(
                    ranks, meeting, way, head, self._owners, captured, self._recipe
                )
            except Exception:
                if not ranks.broken:  # this rank alone: the others go on
                    for each in arrival.gradients:
                        self._rescale.abstain(each, ranks)
                raise
        weighted = list(arrival.gradients)
        if self._apply:
            weights = solution.extra_weights
            if ranks is not None:
                weights = weights.narrow(0, own_rows.start, own_rows.stop - own_rows.start)
            weighted = times(arrival.gradients, weights, self._per)
        for each, features in zip(weighted, arrival.features, strict=True):
            self._rescale.expect(each, features(), captured.unscale, ranks)
        if self._rescale.scaler is None:  # with one, such a step is skipped: all in order
            self.trouble.maybe(solution.objective == torch.inf)
        self.last = StepReport(
            solution=solution,
            drift=drift,
            fallbacks=self.trouble.count,
            applied=self._apply,
            reason="" if self._apply else "observe",
            own=own_rows,
        )
        return weighted if self._apply else None

    def _way(self, ranks: Ranks, meeting: Meeting, captured: Captured) -> str | None:
        """How to solve with the other ranks; None if that is not worth it."""
        params = None
        if self._scope.name == "auto":
            groups = self._owners["weight"].param_groups
            params = sum(p.numel() for group in groups for p in group["params"])
        way = choose_way(
            ranks,
            meeting,
            captured,
            self._recipe,
            factorises=uniform(self._owners),
            params=params,
        )
        if way is None:
            self.trouble.warn(
                "dear",
                "solving over all ranks would send more than a quarter of what the gradients do, "
                "or repeat too much work on each, so each rank solves for its own samples; "
                'scope="global" insists, scope="local" agrees',
            )
        return way

    def _accumulates(self) -> bool:
        head = self._head()
        parts = [] if head is None else [getattr(head, part) for part in self._owners]
        return any(part.grad is not None for part in parts)

    def _check(self, training: bool) -> nn.Linear:
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

    def _fall_back(self, gradient: Tensor, error: Exception) -> None:
        self._rescale.miss()
        expected = isinstance(error, Hindrance)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        self.trouble.step(reason if expected else "error", reason)
        unknown = torch.full((rows_of(gradient, self._per),), torch.nan, device=gradient.device)
        evidence = Evidence(lower_bound=unknown.sum(), drift_after=unknown)
        self.last = StepReport(
            solution=Solution(torch.zeros_like(unknown), unknown.sum(), 0, evidence),
            drift=unknown,
            fallbacks=self.trouble.count,
            applied=False,
            reason=reason,
        )
