"""The one line a user writes: find the head and its optimizer, make a Reducer."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from primum.reducer import Primum, Recipe, Reducer
from primum.update import check_supported

# Where the common families keep the layer that makes their output: torchvision, Transformers.
HEAD_NAMES = ("fc", "classifier", "head", "heads", "score", "lm_head", "qa_outputs")
WRAPPERS = ("_orig_mod", "module")  # torch.compile; DataParallel and its kin


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float = 0.2,
    max_extra_weight: float = 2.0,
    max_iters: int = 20,
    recipe: Recipe | str = "primum",
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
        radius: How far the step may be bent, relative to its own size. 0 is plain training.
        max_extra_weight: No sample's gradient counts more than `1 + max_extra_weight` times.
        max_iters: Solver iterations per step.
        recipe: "primum"; "paper" for the paper's own method; or a recipe object, which brings its
            settings along.

    Returns:
        The `Reducer`: `.last` reports on the last step, `.remove()` ends it. Need not be kept.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> reducer = primum.attach(model, optimizer)
        >>> inputs, labels = torch.randn(32, 8), torch.randint(3, (32,))
        >>> nn.functional.cross_entropy(model(inputs), labels).backward()
        >>> optimizer.step()
        >>> bool(reducer.last.harm_after <= reducer.last.harm_before)
        True
    """
    chosen = _recipe(recipe, radius, max_extra_weight, max_iters)
    return _make(model, optimizer, head, chosen, apply=True)


def observe(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    *,
    head: nn.Linear | str | None = None,
    radius: float = 0.2,
    max_extra_weight: float = 2.0,
    max_iters: int = 20,
    recipe: Recipe | str = "primum",
) -> Reducer:
    """Measure interference and leave the gradients alone, bit for bit. Arguments as `attach`."""
    chosen = _recipe(recipe, radius, max_extra_weight, max_iters)
    return _make(model, optimizer, head, chosen, apply=False)


def _recipe(recipe: Recipe | str, radius: float, max_extra_weight: float, max_iters: int) -> Recipe:
    if recipe == "primum":
        return Primum(radius=radius, max_extra_weight=max_extra_weight, max_iters=max_iters)
    if recipe == "paper":
        _at_default("max_iters", max_iters, "recipe=Paper(PaperSettings(solver_iters=...))")
        paper = import_module("primum.paper")  # on demand: the core does without it
        settings = paper.PaperSettings(radius=radius, max_extra_weight=max_extra_weight)
        chosen: Recipe = paper.Paper(settings)
        return chosen
    if isinstance(recipe, str) or not callable(recipe):
        raise ValueError(f'recipe must be "primum", "paper" or a recipe object, got {recipe!r}')
    given = {"radius": radius, "max_extra_weight": max_extra_weight, "max_iters": max_iters}
    for name, value in given.items():
        _at_default(name, value, "the recipe object")
    return recipe


def _at_default(name: str, value: float, where: str) -> None:
    if value != getattr(Primum, name):
        raise ValueError(f"{name}={value!r} has no effect here; set it in {where}")


def _make(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | Any,
    head: nn.Linear | str | None,
    recipe: Recipe,
    *,
    apply: bool,
) -> Reducer:
    linear = find_head(model) if head is None else _given_head(model, head)
    name = next((n for n, m in model.named_modules() if m is linear), "head") or "head"
    weight: Tensor = linear.weight
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"{name}.weight is computed from other parameters (weight norm, a parametrization), so "
            "no optimizer holds it; primum needs a plain nn.Linear as head"
        )
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name}.weight has no shape yet; run one batch before attaching")
    if not weight.requires_grad:
        raise ValueError(
            f"{name}.weight is frozen (requires_grad=False), so no step changes it; "
            "unfreeze it or pass the head that is trained"
        )
    optimizers = _optimizers(optimizer)
    owners = {"weight": _owner(optimizers, weight)}
    bias: Tensor | None = linear.bias
    if bias is not None and bias.requires_grad:
        owners["bias"] = _owner(optimizers, bias)
    for part, owner in list(owners.items()):
        if owner is None and part == "weight":
            raise ValueError(
                f"the optimizer does not hold {name}.weight; pass the optimizer that trains it"
            )
        if owner is None:
            del owners[part]  # a bias that nothing moves is a constant
        else:
            check_supported(owner, getattr(linear, part), f"{name}.{part}")
    return Reducer(linear, {k: v for k, v in owners.items() if v is not None}, recipe, apply=apply)


def _optimizers(given: Optimizer | Iterable[Optimizer] | Any) -> list[Optimizer]:
    """All torch optimizers in what the user passed."""
    if isinstance(given, Optimizer):
        return [given]
    if hasattr(given, "optimizer"):
        return _optimizers(given.optimizer)
    if isinstance(given, dict):
        given = given.values()
    if isinstance(given, Iterable) and not isinstance(given, str):
        return [found for each in given for found in _optimizers(each)]
    raise TypeError(
        "optimizer must be a torch.optim.Optimizer, several, or a wrapper with an .optimizer; "
        f"got {type(given).__name__}"
    )


def _owner(optimizers: list[Optimizer], param: Tensor) -> Optimizer | None:
    for optimizer in optimizers:
        if any(held is param for group in optimizer.param_groups for held in group["params"]):
            return optimizer
    return None


def _given_head(model: nn.Module, head: nn.Module | str) -> nn.Linear:
    if isinstance(head, str):
        try:
            head = model.get_submodule(head)
        except AttributeError:
            raise ValueError(f"the model has no module named {head!r}; {_listed(model)}") from None
    if not isinstance(head, nn.Linear):
        raise TypeError(f"head must be an nn.Linear, got {type(head).__name__}; {_listed(model)}")
    return head


def find_head(model: nn.Module) -> nn.Linear:
    """The last linear layer, where there is no doubt about it; otherwise an error with candidates.

    In this order: what the model itself says (timm's `get_classifier`), the names that torchvision
    and Transformers use, and the last layer of a plain module: a direct child, or the end of a
    Sequential, that nothing with parameters follows and that no second head runs beside.
    """
    for wrapper in WRAPPERS:
        inner = getattr(model, wrapper, None)
        if isinstance(inner, nn.Module):
            return find_head(inner)
    if isinstance(model, nn.Linear):
        return model
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        classifier = get_classifier()
        if isinstance(classifier, nn.Linear):
            return classifier
    named = {n: _last_linear(m) for n, m in model.named_children() if n in HEAD_NAMES}
    found = [linear for linear in named.values() if linear is not None]
    if len(found) == 1:
        return found[0]
    plain = _end_of(model)
    if not found and plain is not None:
        return plain
    raise ValueError(f"cannot tell which layer is the head; {_listed(model)}")


def _last_linear(module: nn.Module) -> nn.Linear | None:
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return linears[-1] if linears else None


def _end_of(model: nn.Module) -> nn.Linear | None:
    """The linear layer that a plain module ends in, or None if it may be another one."""
    children = [m for m in model.children() if next(m.parameters(), None) is not None]
    if not children:
        return None
    last = children[-1]
    if isinstance(last, nn.Sequential):
        return _end_of(last)
    if not isinstance(last, nn.Linear):
        return None
    beside = (
        other
        for other in children[:-1]
        if isinstance(other, nn.Linear)
        and other.in_features == last.in_features
        and other.out_features != last.in_features
    )
    return None if next(beside, None) is not None else last


def _listed(model: nn.Module) -> str:
    linears = [
        f"{name} ({m.in_features} -> {m.out_features})"
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    ]
    if not linears:
        return "the model has no nn.Linear, and primum works on the last one"
    shown = ", ".join(linears[-12:])
    more = f" (and {len(linears) - 12} before them)" if len(linears) > 12 else ""
    return f"pass head= one of: {shown}{more}"
