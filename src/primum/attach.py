"""The one line a user writes: find the head and its optimizer, make a Reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.bypass import bypassed
from primum.checks import check_head, check_order, grad_scaler, optimizers_in, owner_of
from primum.find import find_head, given_head
from primum.hook import hooked
from primum.positions import RADIUS, Per
from primum.ranks import Scope
from primum.recipe import Primum, Recipe
from primum.reducer import Reducer
from primum.refused import check_model, check_owner, made_late
from primum.shards import Shards, check_rules, shards_of
from primum.update import check_supported


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float | None = None,
    max_extra_weight: float = 2.0,
    max_iters: int = 12,
    tolerance: float = 0.005,
    compile: bool = False,
    exact: bool = False,
    recipe: Recipe | str = "primum",
    per: str = "auto",
    scaler: Any = None,
    scope: str = "auto",
    process_group: Any = None,
) -> Reducer:
    """Reduce per-sample interference in every step from now on. The training loop does not change.

    During `backward`, each row of the gradient at the head's output is multiplied by `1 + w`, so
    that head and backbone receive the gradient of `mean((1 + w) * losses)`. The extra weights
    w >= 0 limit how much the step raises the loss of single samples.

    Args:
        model: Any module whose output is made by an `nn.Linear` that is trained.
        optimizer: The optimizer that holds the head's parameters. If you pass several, or a
            wrapper with an `.optimizer`, the right one is found.
        head: The last linear layer, as a module or by its dotted name; found automatically if
            None.
        radius: How far the step may be changed, relative to its own size. 0 is plain training. The
            default is 0.4 for samples, 0.1 for tokens and 0.2 for `recipe="paper"`; a recipe object
            has its own.
        max_extra_weight: No sample's gradient counts more than `1 + max_extra_weight` times.
        max_iters: Maximum number of solver iterations per step; on accelerators and over ranks,
            the exact number.
        tolerance: The certified gap, relative to the harm, at which the solver stops on the CPU.
        compile: Compile the solver for the shape of the first batch; useful on accelerators.
        exact: Never approximate. With weights per token and a large vocabulary, an exact solution
            costs several times as much as the head itself.
        recipe: "primum"; "paper" for the paper's own method; or a recipe object, which has its own
            settings.
        per: "sample": one weight per row of the first dimension. "token": one weight per position
            of inputs [B, T, d]. "auto": tokens if the head's input is [B, T, d] and the loss has
            one term per position, as in language models, and samples otherwise; decided in the
            first backward pass, logged, and kept for the run.
        scaler: The loop's `torch.amp.GradScaler`, or an object that holds it; None if it has none.
        scope: With several ranks, "global" solves the global batch's problem and "local" each
            rank's own; "auto" solves the global problem under DistributedDataParallel and
            fully_shard if that is cheap.
        process_group: The ranks of "global" and "auto"; by default those of
            DistributedDataParallel or, under "global" without it, all.

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
    chosen = _recipe(
        recipe,
        radius=radius,
        per=per,
        max_extra_weight=max_extra_weight,
        max_iters=max_iters,
        tolerance=tolerance,
        compile=compile,
        exact=exact,
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_model(model)
    scaler = grad_scaler(scaler)
    optimizers = list(optimizers_in(optimizer))
    linear = find_head(model) if head is None else given_head(model, head)
    name = next((name for name, each in model.named_modules() if each is linear), "") or "head"
    shards = shards_of(model, linear, name)
    check_head(model, linear, name, split=shards is not None)
    owners = _owners(optimizers, linear, name, shards)
    ranks = Scope(scope, process_group, model, None if shards is None else shards.ranks)
    detach(linear)  # attaching again replaces what was there
    follows = radius is None and recipe == "primum"
    reducer = Reducer(
        model,
        linear,
        owners=owners,
        recipe=chosen,
        per=Per(per, name, radius_follows=follows),
        scaler=scaler,
        scope=ranks,
        name=name,
        check_output=model is not linear,
        shards=shards,
    )
    reducer.warn_if_bypassed(bypassed(model, linear, name))
    return reducer


def observe(model: nn.Module, optimizer: Any, **settings: Any) -> Reducer:
    """Measure interference without changing any gradient. Takes the arguments of `attach`."""
    reducer = attach(model, optimizer, **settings)
    reducer._apply = False
    return reducer


def detach(model: nn.Module) -> None:
    """Remove every Reducer attached to the model; training continues with plain gradients.

    Use it if you did not keep what `attach` returned. Does nothing if nothing is attached.

    Examples:
        >>> model = nn.Linear(8, 3)
        >>> _ = primum.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> primum.detach(model)
    """
    for module in model.modules():
        for listener in hooked(module):
            owner = getattr(listener, "owner", None)
            if isinstance(owner, Reducer):
                owner.remove()


def _recipe(recipe: Recipe | str, *, radius: float | None, per: str, **settings: Any) -> Recipe:
    if recipe == "primum":
        own = RADIUS["token" if per == "token" else "sample"]
        return Primum(radius=own if radius is None else radius, **settings)
    given = {} if radius is None else {"radius": radius}
    if recipe == "paper":
        shared = given | {"max_extra_weight": settings.pop("max_extra_weight")}
        settings.pop("exact")  # it always is
        _at_default(settings, "recipe=Paper(PaperSettings(solver_iters=...))")
        paper = import_module("primum.paper")  # on demand: the core does without it
        chosen: Recipe = paper.Paper(paper.PaperSettings(**shared))
        return chosen
    if isinstance(recipe, str) or not callable(recipe):
        raise ValueError(f'recipe must be "primum", "paper" or a recipe object, got {recipe!r}')
    _at_default(settings | given, "the recipe object")
    return recipe


def _at_default(settings: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        if value != getattr(Primum, name):
            raise ValueError(f"{name}={value!r} has no effect here; set it in {where}")


def _owners(
    optimizers: list[Optimizer], linear: nn.Linear, name: str, shards: Shards | None
) -> dict[str, Optimizer]:
    """The optimizers of the head's "weight" and, if one holds it, "bias"; refuses unfit ones."""
    weight_owner = owner_of(optimizers, linear.weight)
    if weight_owner is None:
        raise ValueError(
            f"the optimizer does not hold {name}.weight; pass the optimizer that trains it"
            + made_late(split=shards is not None)
        )
    owners = {"weight": weight_owner}
    bias: Tensor | None = linear.bias
    bias_owner = owner_of(optimizers, bias)
    if bias is not None and bias.requires_grad and bias_owner is not None:
        owners["bias"] = bias_owner  # otherwise nothing moves it: a constant
    for part, owner in owners.items():
        check_owner(owner, name)
        if shards is not None:
            check_rules(owner)
        check_supported(owner, getattr(linear, part), f"{name}.{part}")
        check_order(owner, getattr(linear, part))
    return owners
