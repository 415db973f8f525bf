"""The one line a user writes. `attach` is the only place that wires the parts together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.distributed.collectives import world_size
from primum.distributed.fsdp2 import HeadShard, is_split, reshard
from primum.distributed.over_ranks import OverRanks
from primum.distributed.scope import Scope
from primum.guards.effect import Effect
from primum.guards.gradient_scale import MeasuredScale
from primum.guards.steps import StepWatch
from primum.guards.watchers import Discards, NonFinite, SeveralCalls, Stopwatch
from primum.hooks.head_hook import HeadHook
from primum.hooks.unsaved import hooked
from primum.kernel.builder import Builder
from primum.kernel.engine import Engine
from primum.kernel.head import Head
from primum.kernel.recipe import Primum, Recipe
from primum.reducer import Reducer
from primum.setup.bypass import bypassed
from primum.setup.find import find_head, given_head
from primum.setup.output_check import OutputCheck
from primum.setup.validate import (
    check_head,
    check_model,
    grad_scaler,
    optimizers_in,
    optimizers_of,
    why_lost,
)
from primum.tokens.layout import Granularity
from primum.tokens.sketch import Sketched

if TYPE_CHECKING:
    from primum.diagnostics.diagnose import Diagnosis


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float | None = None,
    per: str = "auto",
    scaler: Any = None,
    scope: Any = "auto",
    recipe: Recipe | str = "primum",
) -> Reducer:
    """Reduce per-sample interference in every step from now on. The training loop does not change.

    During `backward`, each row of the gradient at the head's output is multiplied by `1 + w`, so
    that head and backbone receive the gradient of `mean((1 + w) * losses)`. The extra weights
    w >= 0 limit how much the step raises the loss of single samples.

    Args:
        model: Any module that ends in a trained `nn.Linear`.
        optimizer: The optimizer that holds the head's parameters. If you pass several, or a
            wrapper with an `.optimizer`, the right one is found.
        head: The last linear layer, as a module or by its dotted name; found automatically if
            None.
        radius: How far the step may be changed, relative to its own size. 0 is plain training. The
            default is 0.4 for samples, 0.1 for tokens and 0.2 for `recipe="paper"`; a recipe object
            has its own.
        per: Weight samples or tokens. "sample": one weight per row of the first dimension.
            "token": one weight per position of inputs [B, T, d]. "auto": tokens if the head's input
            is [B, T, d] and the loss has one term per position, as in language models, and samples
            otherwise; decided in the first backward pass, logged, and kept for the run.
        scaler: The loop's `torch.amp.GradScaler`, or an object that holds it; None if it has none.
        scope: With several ranks, "global" solves the global batch's problem and "local" each
            rank's own; "auto" solves the global problem under DistributedDataParallel and
            fully_shard if that is cheap. A process group: "global" over its ranks.
        recipe: "primum"; "paper" for the paper's own method; or a recipe object with settings of
            its own, such as `primum.Primum(max_iters=50)`.

    Returns:
        The `Reducer`: `.last` is the report of the last step, `.remove()` detaches it. You do not
        have to keep it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> reducer = primum.attach(model, optimizer)
        >>> inputs, labels = torch.randn(32, 8), torch.randint(3, (32,))
        >>> nn.functional.cross_entropy(model(inputs), labels).backward()
        >>> optimizer.step()
        >>> bool(reducer.last.harm_after <= reducer.last.harm_before)
        True
    """
    return _attach(model, optimizer, head, radius, per, scaler, scope, recipe, apply=True)


def observe(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float | None = None,
    per: str = "auto",
    scaler: Any = None,
    scope: Any = "auto",
    recipe: Recipe | str = "primum",
) -> Reducer:
    """Measure interference without changing any gradient. Takes the arguments of `attach`."""
    return _attach(model, optimizer, head, radius, per, scaler, scope, recipe, apply=False)


def detach(model: nn.Module) -> None:
    """Remove every Reducer attached to the model; training continues with plain gradients.

    Use it if you did not keep what `attach` returned. Does nothing if nothing is attached.

    Examples:
        >>> model = nn.Linear(8, 3)
        >>> _ = primum.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> primum.detach(model)
    """
    for module in model.modules():
        for hook in hooked(module):
            if isinstance(hook, HeadHook) and hook.reducer is not None:
                hook.reducer.remove()


def diagnose(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
) -> Diagnosis:
    """Say whether primum is likely to help here: 20 plain steps, and 20 that are measured.

    Works on copies: model, optimizer and random states stay as they are. The steps are those of the
    optimizer alone, at its present learning rate, without schedule, clipping or gradient scaler.
    Call it after the first epoch if you can: our settings were measured there.

    Args:
        model: As in `attach`.
        optimizer: As in `attach`.
        batches: A DataLoader, a list, or any iterable of what `loss_fn` takes; repeated if it has
            fewer than 40. An iterator loses what is drawn from it.
        loss_fn: From the model and a batch to one loss per sample or token.

    Returns:
        The numbers, a `.verdict` in words and `.plot()`. `print` it.

    Examples:
        >>> def losses(model, batch):
        ...     inputs, labels = batch
        ...     return nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        >>> print(primum.diagnose(model, optimizer, loader, losses).verdict)
        Likely to help: above two thirds of a step. There, 10 of our 23 image settings ...
    """
    from primum.diagnostics import diagnose as room  # on demand: the core does without it

    return room.diagnose(model, optimizer, batches, loss_fn)


def _attach(
    model: nn.Module,
    optimizer: Any,
    head: nn.Linear | str | None,
    radius: float | None,
    per: str,
    scaler: Any,
    scope: Any,
    recipe: Recipe | str,
    *,
    apply: bool,
) -> Reducer:
    chosen = recipe_of(recipe, radius)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_model(model)
    optimizers = list(optimizers_in(optimizer))
    reshard(model)
    layer = find_head(model, optimizers) if head is None else given_head(model, head)
    names = {id(each): name for name, each in model.named_modules()}
    name = names.get(id(layer), "") or "head"
    split = is_split(model, layer, name)
    check_head(layer, name, split=split)
    held = optimizers_of(optimizers, layer, name)
    shard = HeadShard(model, layer, held, name) if split else None
    own = shard or Head(layer, held, name)
    scoped = Scope(scope, model, None if shard is None else shard.ranks)
    known = weakref.ref(model)
    own.why_lost = lambda: why_lost(known())  # type: ignore[method-assign]
    layout = Granularity(per, name)
    detach(layer)  # attaching again replaces what was there

    engine = Engine(own, chosen, layout, apply=apply)
    own.scale = scale = MeasuredScale(own, grad_scaler(scaler))
    engine.builder = alone = Builder() if shard else Sketched()
    if world_size():
        divisor = None if shard is None else shard.divisor
        engine.builder = OverRanks(alone, scoped, engine.warn, divisor)
    effect, stopwatch = Effect(engine), Stopwatch(engine)
    watch = StepWatch(engine, model, scale.before_step, stopwatch.after_step, effect.after_step)
    discards = Discards(engine, watch, scale.scaler)
    engine.observers += [stopwatch, watch, discards, SeveralCalls(engine), scale]
    engine.observers += [effect] if scale.scaler else [effect, NonFinite(engine)]
    reducer = Reducer(engine, layout, scale, watch, stopwatch)
    hook = HeadHook(layer, engine, reducer, scoped.peers)
    check = OutputCheck(model, hook, engine)
    engine.observers.append(check)
    reducer.own(hook, check.remove)
    chosen.attached(scale.scaler, weakref.proxy(watch))  # a recipe may outlive the engine
    reducer.warn_if_bypassed(bypassed(model, layer, name))
    logging.getLogger("primum").info(
        "primum: %s %s with head %r (%d -> %d), %s, radius %s",
        "reweighting" if apply else "observing",
        {"auto": "samples or tokens, as the first batch shows"}.get(per, f"{per}s"),
        *(name, *reversed(own.shape), type(held["weight"]).__name__),
        radius if radius is not None else chosen.radius_of(layout.per),
    )
    return reducer


def recipe_of(recipe: Recipe | str, radius: float | None) -> Recipe:
    """The recipe that `attach` uses for these arguments."""
    if recipe == "primum":
        return Primum(radius=radius)
    if recipe == "paper":
        paper = import_module("primum.paper")  # on demand: the core does without it
        given = {} if radius is None else {"radius": radius}
        chosen: Recipe = paper.Paper(paper.PaperSettings(**given))
        return chosen
    if not isinstance(recipe, Recipe):
        raise ValueError(f'recipe must be "primum", "paper" or a primum.Recipe, got {recipe!r}')
    if radius is not None:
        raise ValueError(f"radius={radius!r} has no effect here; set it in the recipe object")
    return recipe
