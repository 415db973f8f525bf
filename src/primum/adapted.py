"""Heads that are frozen or no plain linear layer: which layer is measured in their place.

Interference is measured where a step can be predicted: in a plain `nn.Linear` that is trained. If
the head is none (frozen, with adapters before it; weight-normed; normalised; a convolution), it is
measured in the last one before the head, and the weights still go in at the head: see `outlet.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from primum.checks import is_affine, owner_of
from primum.compat import parameter
from primum.find import HEAD_NAMES, ends_of, find_head, given_module, is_linear, trained_copy
from primum.find import given_head as given_linear
from primum.widths import children_of


@dataclass(frozen=True)
class Place:
    """Where interference is measured, and where the weights go in.

    Attributes:
        head: The layer whose gradients and next step are measured.
        output: The module whose output is weighed; None if that is the layer's own.
    """

    head: nn.Linear
    output: nn.Module | None = None


def find_place(
    model: nn.Module, head: nn.Module | str | None, optimizers: Sequence[Optimizer]
) -> Place:
    """The head itself, if it is a plain linear layer that is trained; else the last one before it.

    A trained layer that is passed as `head` but does not make the output is measured, and what
    makes the output is weighed. Raises where no layer is certain.
    """
    inside = list(model.modules())
    given = None if head is None else given_module(model, head)
    known = given is None or any(each is given for each in inside)
    end = _end(model) if known else None
    if given is not None and (not known or (is_linear(given) and not _unusual(given))):
        apart = end is not None and not any(each is given for each in (end, *ends_of(model)))
        within = end is not None and _is_adapter(end) and any(m is given for m in end.modules())
        return Place(given_linear(model, given), end if apart or within else None)
    if given is not None and _may_be_weighed(given):
        end = _around(given, model)
    elif given is not None:
        end = None
    layer = None if end is None or not _unusual(end) else _last_before(end, model, optimizers)
    if layer is None:
        return Place(find_head(model) if given is None else given_linear(model, given))
    return Place(layer, end)


def _end(model: nn.Module) -> nn.Module | None:
    """The one module that makes the output, of whatever kind; None if that is not certain."""
    ends = ends_of(model)
    if len(ends) == 1:
        return _around(ends[0], model)
    if ends:
        holders = (m for m in model.modules() if _is_adapter(m))
        return next((m for m in holders if _holds(m, ends)), None)
    return _own_kind(model)


def _unusual(module: nn.Module) -> bool:
    """Whether no step of the module itself can be predicted: frozen, computed, not affine."""
    weight = parameter(module, "weight")  # not `.weight`: to compute it may change its state
    if not is_linear(module) or weight is None or not weight.requires_grad:
        return True
    plain = not (isinstance(weight, nn.parameter.UninitializedParameter) or weight.is_meta)
    return plain and weight.dim() == 2 and not is_affine(module)


def _may_be_weighed(module: nn.Module) -> bool:
    """Whether a module that a user passes may make an output: it has a weight, or is an adapter."""
    own = any(p.dim() > 1 for p in module.parameters(recurse=False))
    return own or is_linear(module) or _is_adapter(module)


def _own_kind(module: nn.Module) -> nn.Module | None:
    """A layer of the user's own class (normalised, scaled) that ends the model, if one does."""
    module = trained_copy(module)
    children = children_of(module)
    if not children:
        foreign = not type(module).__module__.startswith("torch.nn")
        own = any(p.dim() > 1 for p in module.parameters(recurse=False))
        return module if foreign and own else None
    usual = [child for name, child in children.items() if name in HEAD_NAMES]
    if len(usual) == 1:
        return _own_kind(usual[0])
    last = list(children.values())[-1]
    return _own_kind(last) if len(children) == 1 or isinstance(module, nn.Sequential) else None


def _is_adapter(module: nn.Module) -> bool:
    """Whether linear layers that are trained correct the output of a frozen one, as in LoRA.

    PEFT's layers keep the frozen one as `base_layer`. In others, it is all that is frozen, and a
    chain of two or more linear layers beside it takes and gives as many features: a single one is
    rather a copy, as in PEFT's `modules_to_save` or beside a target network.
    """
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    if trained_copy(module) is not module:
        return False
    children = {name: child for name, child in module.named_children() if is_linear(child)}
    frozen = [child for child in children.values() if not _has_trained(child)]
    beside = [each for each in module.modules() if is_linear(each) and each not in frozen]
    if len(frozen) != 1 or not any(_has_trained(each) for each in beside):
        return False
    (base,) = frozen
    if children.get("base_layer") is base:
        return True
    if len(beside) < 2:
        return False
    own = {id(p) for each in (base, *beside) for p in each.parameters()}
    fixed = {id(p) for p in base.parameters()}
    others = [p for p in module.parameters() if id(p) not in fixed]
    if not all(p.requires_grad and id(p) in own for p in others):
        return False
    return beside[0].in_features == base.in_features and (
        beside[-1].out_features == base.out_features
    )


def _has_trained(module: nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _around(layer: nn.Module, model: nn.Module) -> nn.Module:
    """The adapter whose base a layer is; any other layer itself."""
    for module in model.modules():
        if module is not layer and _is_adapter(module) and _holds(module, [layer]):
            return module
    return layer


def _holds(module: nn.Module, layers: Iterable[nn.Module]) -> bool:
    inside = {id(each) for each in module.modules()}
    return all(id(each) in inside for each in layers)


def _last_before(
    end: nn.Module, model: nn.Module, optimizers: Sequence[Optimizer]
) -> nn.Linear | None:
    """The last plain linear layer that is trained: in an adapter, before `end`, or anywhere."""
    inside = {id(each) for each in end.modules()}
    modules = list(model.modules())
    place = next((i for i, each in enumerate(modules) if each is end), len(modules))
    outside = [each for each in modules if id(each) not in inside]
    before = [each for each in modules[:place] if id(each) not in inside]
    own = end.modules() if _is_adapter(end) else iter(())
    for some in (list(own), before, outside):
        found = list(_trained(some, optimizers))
        if found:
            return found[-1]
    return None


def _trained(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[nn.Linear]:
    """Those that can be measured: not sharded ones, whose blocks a second pass would reshard."""
    for each in modules:
        if not is_linear(each) or _unusual(each) or hasattr(each.weight, "__tensor_flatten__"):
            continue
        if owner_of(list(optimizers), each.weight) is not None:
            yield each
