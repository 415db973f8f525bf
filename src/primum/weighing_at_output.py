"""One backward pass that is measured in an earlier layer and weighed at the output."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from primum.capture import Listener, Pass
from primum.choices import Options
from primum.compat import executes, parameter
from primum.explicit import check_row_order
from primum.fallback import Plain, guarded
from primum.outlet import Outlet, check_rows, weigh_rows
from primum.output_check import OutputCheck
from primum.positions import Call, seen_in
from primum.ranks import Ranks
from primum.weighing import Weighing

UNSEEN = (
    "The autograd graph from that layer to the output must be built in eager mode: torch.compile "
    "hides it, and so does torch.utils.checkpoint with use_reentrant=True; do not compile anything "
    "from that layer on, and pass use_reentrant=False"
)


class WeighingAtOutput(Weighing):
    """`Weighing`, with an `Outlet` if the weights go in at another module than the head."""

    enabled: bool
    _listener: weakref.ref[Listener] | None

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.head_name = options.name
        self.output_name = options.output_name or options.name
        self.marked = False  # whether the head has run in eager mode, for the `OutputCheck`
        self._checked = False
        self._outlet: weakref.ref[Outlet] | None = None
        marks: Callable[[], WeighingAtOutput | Outlet | None] = weakref.ref(self)
        if options.output is not None:
            self._monitor.bypass = UNSEEN
            outlet = Outlet(options.output, self, self.output_name, options.model)
            marks = self._outlet = weakref.ref(outlet)
        self._output_check = None
        if options.check_output:
            warn = partial(self._monitor.warn, "output")
            self._output_check = OutputCheck(options.model, marks, self.output_name, warn)

    def _active(self) -> bool:
        return self.enabled and self._listener is not None

    def _ranks(self, *, eager: bool) -> Ranks | None:
        ranks = self._scope.ranks(eager=eager)
        alone = self._scope.why_alone() if ranks is None else None
        if alone is not None:
            self._monitor.warn(*alone)
        return ranks

    def _remove_from_model(self) -> None:
        outlet = None if self._outlet is None else self._outlet()
        if outlet is not None:
            outlet.remove()
        if self._output_check is not None:
            self._output_check.remove()

    def on_output(
        self, gradient: Tensor, output: int | GradientEdge, ranks: Ranks | None
    ) -> Tensor | None:
        """The gradient arrived at the output: hand on the weighted one. None leaves it as it is."""
        outlet = None if self._outlet is None else self._outlet()
        weight = parameter(self._head(), "weight")
        if outlet is None or weight is None or not weight.requires_grad:
            return None
        # For bookkeeping: of the size that a gradient at the layer's output has, without memory.
        like = weight.detach()[:, 0].expand(gradient.size(0), -1)
        return self._at_output(outlet, gradient, output, ranks, weight, like)

    @guarded
    def _at_output(
        self,
        outlet: Outlet,
        gradient: Tensor,
        output: int | GradientEdge,
        ranks: Ranks | None,
        weight: Tensor,
        like: Tensor,
    ) -> Tensor | None:
        edge = outlet.edge(output)
        calls = outlet.passes(edge, self)
        calls = {made: call for made, call in calls.items() if made.weight is weight}
        if not any(made.trains_head() for made in calls):
            accumulator = torch.autograd.graph.get_gradient_edge(weight).node
            if calls or not executes(accumulator):
                return None  # a gradient for another purpose
        if any(made.weighed for made in calls):
            return None  # the explicit form has done it; the hook on the layer accounts for it
        self._monitor.passes += 1
        if not self._active() or any(made.differentiated for made in calls):
            self._rescale.miss(like)
            return None
        terms: str | None = None
        carried, seen = [like], list[Pass | Call](calls)
        try:
            if not calls:
                raise Plain(
                    f"the measured layer {self.head_name!r} is not in the autograd graph of the "
                    f"output of {self.output_name!r}. {UNSEEN}. If that output does not depend "
                    "on it, pass head= a layer that it does depend on"
                )
            edges = list(calls.values())
            began = time.perf_counter()
            carried = outlet.carry(edge, gradient, edges)
            self._monitor.spend(time.perf_counter() - began)
            check_rows(gradient, carried, self._per.now)
            mixed = outlet.mixes(edge, gradient, edges, self._monitor.warn, self._per.now)
            self._per.mixed = mixed
            if mixed and self._per.now == "token":
                raise Plain(self._mixed)
            if not self._per.settled:  # at the layer, a sample's loss reaches all its positions
                whole = mixed or gradient.dim() != 3
                terms = "sample" if whole else seen_in(gradient)
        except Warning:
            raise
        except Exception as error:  # raised while weighing: other ranks wait for this one there
            seen = [Call(partial(_raise, error), all(made.training for made in calls))]
        weighted = self._weigh(carried[: len(seen)], seen, ranks, terms=terms)
        for made in calls:
            made.differentiated = gradient.requires_grad
            made.release()
        if weighted is None or self._last is None:
            return None
        weights = self._last.extra_weights[self._last.own]
        with torch.set_grad_enabled(gradient.requires_grad):  # under `create_graph=True`
            return weigh_rows(gradient, weights, self._per.now)

    @property
    def _mixed(self) -> str:
        return (
            f"positions affect each other between the measured layer {self.head_name!r} and "
            f"{self.output_name!r} (attention, pooling), so tokens cannot be measured one by one; "
            'pass per="sample"'
        )

    def _check_losses(self, losses: Tensor, calls: list[GradientEdge], per: str) -> None:
        """In the explicit form, once: refuse losses of other rows, or of tokens and others."""
        if self._checked:
            return
        self._checked = True
        check_row_order(losses, calls, per)
        if self._outlet is None or per != "token":
            return
        last = losses.detach().flatten().nonzero()[-1:].flatten()  # SYNC: once
        alone = losses.flatten()[last].sum()
        for each in torch.autograd.grad(alone, calls, retain_graph=True):
            if each.flatten(0, -2).any(-1).sum() > 1:  # SYNC: once
                raise ValueError(self._mixed)


def _raise(error: Exception) -> Tensor:
    raise error
