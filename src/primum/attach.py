"""The one line a user writes: find the head and its optimizer, make a Reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.checks import check_head, check_order, grad_scaler, optimizers_in, owner_of
from primum.find import find_head, given_head
from primum.hook import hooked
from primum.ranks import Scope
from primum.recipe import Primum, Recipe
from primum.reducer import Reducer
from primum.refused import check_model, check_owner, made_late
from primum.shards import check_rules, shards_of
from primum.update import check_supported
from primum.weighing import Options


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float = 0.2,
    max_extra_weight: float = 2.0,
    max_iters: int = 12,
    tolerance: float = 0.005,
    compile: bool = False,
    recipe: Recipe | str = "primum",
    per: str = "sample",
    scaler: Any = None,
    scope: str = "auto",
    process_group: Any = None,
) -> Reducer:
    """Reduce per-sample interference in every step from here on. The training loop stays as it is.

    During `backward`, the gradient that arrives at the head's output is multiplied, row by row, by
    `1 + w`: head and backbone receive the gradient of `mean((1 + w) * losses)`, with extra weights
    w >= 0 that limit how much the step raises the loss of single samples.

    Args:
        model: Any module that ends in an `nn.Linear`.
        optimizer: The optimizer that holds the head's parameters; several, or a wrapper with an
            `.optimizer`, are searched for it.
        head: The last linear layer, as a module or by its dotted name. Found if not given.
        radius: How far the step may be changed, relative to its own size. 0 is plain training.
        max_extra_weight: No sample's gradient counts more than `1 + max_extra_weight` times.
        max_iters: Most solver iterations per step; on accelerators and over ranks, the number.
        tolerance: The certified gap, relative to the harm, at which the solver stops on the CPU.
        compile: Compile the solver for the shape of the first batch; for accelerators.
        recipe: "primum"; "paper" for the paper's own method; or a recipe object, which brings its
            settings along.
        per: "sample": weights for rows of the first dimension. "token": for every position of
            inputs [B, T, d] by itself.
        scaler: The `torch.amp.GradScaler` of the loop, or what holds it, if there is one.
        scope: Over several ranks, "global" solves the global batch's problem and "local" each
            rank's own; "auto" solves together under DistributedDataParallel and fully_shard, where
            that is cheap.
        process_group: The ranks of "global"; by default those of DistributedDataParallel, or all.

    Returns:
        The `Reducer`: `.last` reports on the last step, `.remove()` ends it. Need not be kept.

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
        max_extra_weight=max_extra_weight,
        max_iters=max_iters,
        tolerance=tolerance,
        compile=compile,
    )
    reach = scope, process_group
    return _make(model, optimizer, head, chosen, per, scaler, reach, apply=True)


def observe(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float = 0.2,
    max_extra_weight: float = 2.0,
    max_iters: int = 12,
    tolerance: float = 0.005,
    compile: bool = False,
    recipe: Recipe | str = "primum",
    per: str = "sample",
    scaler: Any = None,
    scope: str = "auto",
    process_group: Any = None,
) -> Reducer:
    """Measure interference and leave the gradients alone, bit for bit. Arguments as `attach`."""
    chosen = _recipe(
        recipe,
        radius=radius,
        max_extra_weight=max_extra_weight,
        max_iters=max_iters,
        tolerance=tolerance,
        compile=compile,
    )
    reach = scope, process_group
    return _make(model, optimizer, head, chosen, per, scaler, reach, apply=False)


def detach(model: nn.Module) -> None:
    """Remove every Reducer attached to a layer of the model. Training goes on plain.

    For loops that discard what `attach` returned; does nothing if nothing is attached.

    Examples:
        >>> model = nn.Linear(8, 3)
        >>> _ = primum.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> primum.detach(model)
    """
    for module in model.modules():
        for listener in hooked(module):
            if isinstance(getattr(listener, "owner", None), Reducer):
                listener.owner.remove()


def _recipe(recipe: Recipe | str, **settings: Any) -> Recipe:
    if recipe == "primum":
        return Primum(**settings)
    if recipe == "paper":
        shared = {name: settings.pop(name) for name in ("radius", "max_extra_weight")}
        _at_default(settings, "recipe=Paper(PaperSettings(solver_iters=...))")
        paper = import_module("primum.paper")  # on demand: the core does without it
        chosen: Recipe = paper.Paper(paper.PaperSettings(**shared))
        return chosen
    if isinstance(recipe, str) or not callable(recipe):
        raise ValueError(f'recipe must be "primum", "paper" or a recipe object, got {recipe!r}')
    _at_default(settings, "the recipe object")
    return recipe


def _at_default(settings: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        if value != getattr(Primum, name):
            raise ValueError(f"{name}={value!r} has no effect here; set it in {where}")


def _make(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    head: nn.Linear | str | None,
    recipe: Recipe,
    per: str,
    scaler: Any,
    reach: tuple[str, Any],
    *,
    apply: bool,
) -> Reducer:
    if per not in ("sample", "token"):
        raise ValueError(f'per must be "sample" or "token", got {per!r}')
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_model(model)
    scaler = grad_scaler(scaler)
    linear = find_head(model) if head is None else given_head(model, head)
    name = next((n for n, m in model.named_modules() if m is linear), "") or "head"
    shards = shards_of(model, linear, name)
    check_head(model, linear, name, split=shards is not None)
    optimizers = list(optimizers_in(optimizer))
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
    scope = Scope(*reach, model, None if shards is None else shards.ranks)
    detach(linear)  # attaching again replaces what was there
    checked = head is None and model is not linear
    options = Options(apply, per, scaler, scope, name, checked, shards)
    return Reducer(model, linear, owners, recipe, options)
