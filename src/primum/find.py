"""Which layer is the head: the linear layer that makes a model's output, if that is certain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeGuard

from torch import nn

from primum.compat import never_called
from primum.widths import (
    CONVOLUTIONS,
    children_of,
    entry,
    keeps_width,
    may_end,
    plain,
    takes,
    width,
)

# Where the common families keep the layer that makes their output: torchvision, Transformers.
HEAD_NAMES = (
    *("fc", "classifier", "head", "heads"),
    *("classification_head", "score", "qa_outputs", "lm_head"),
)
SCALE_NAMES = ("logit_scale", "temperature")  # Of similarities, as in CLIP and ALIGN.
SHOWN = 12  # Candidates in a message: the last ones, as heads come last.


def find_head(model: nn.Module) -> nn.Linear:
    """The linear layer that makes the output, or an error that lists the candidates.

    Down from the model, in this order: what it declares itself (timm's `get_classifier`,
    Transformers' `get_output_embeddings`); the only child, as in a wrapper (torch.compile,
    DistributedDataParallel, a LightningModule); the last child of a Sequential; the child under a
    usual name; the last child of a plain module, if it is a linear layer, a Sequential, or a block
    of linear and norm layers that changes the width.

    A model with a second head is refused: a child beside the one found that takes the same input
    or makes as many outputs, and whose own output no other child takes. So are models that compare
    embeddings (CLIP) and Transformers' models without a head.
    """
    ends = ends_of(model)
    if len(ends) == 1 and is_linear(ends[0]):
        return ends[0]
    names = {id(layer): name or "the model itself" for name, layer in model.named_modules()}
    shown = [
        names.get(id(end), "another layer") + " (a convolution)" * isinstance(end, CONVOLUTIONS)
        for end in ends
    ]
    if ends and all(isinstance(end, CONVOLUTIONS) for end in ends):
        raise ValueError(
            f"the output seems to come from {shown[0]}, and primum can only reweight at an "
            "nn.Linear: make the output with one (over the channels, it is a 1x1 convolution), or "
            "pass head= the trained nn.Linear that makes the output"
        )
    for name in shown:
        if name.endswith(".base_layer"):
            raise ValueError(_adapted(name.removesuffix(".base_layer")))
    why = f"{' and '.join(shown)} may each produce an output; " if ends else ""
    raise ValueError(f"cannot tell which layer is the head; {why}{candidates(model)}")


def given_head(model: nn.Module, head: nn.Module | str) -> nn.Linear:
    """The head that a user names or passes; of a layer that PEFT trains a copy of, the copy."""
    found: object = _named(model, head) if isinstance(head, str) else head
    if isinstance(found, nn.Module):
        found = trained_copy(found)
    if is_linear(getattr(found, "base_layer", None)):
        raise ValueError(_adapted(head if isinstance(head, str) else type(found).__name__))
    if not is_linear(found):
        kind = type(found).__name__
        raise TypeError(f"head must be an nn.Linear, got {kind}; {candidates(model)}")
    return found


def _adapted(name: str) -> str:
    return (
        f"the head {name!r} is a frozen layer with an adapter beside it (LoRA), so no single "
        "trained nn.Linear makes the output; train the head itself (with PEFT: list it in "
        "modules_to_save instead of target_modules)"
    )


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a linear layer gets called; `nn.MultiheadAttention` has one that does not."""
    return isinstance(module, nn.Linear) and not never_called(module)


def candidates(model: nn.Module) -> str:
    """What a user may pass as `head`, for error messages: the linear layers that are trained."""
    linears = {name: layer for name, layer in model.named_modules() if is_linear(layer)}
    if not linears:
        return "the model has no nn.Linear, and primum needs one"
    trained = [
        f"{name} ({layer.in_features} -> {layer.out_features})" if name else "the model itself"
        for name, layer in linears.items()
        if layer.weight.requires_grad
    ]
    if not trained:
        return "every nn.Linear of the model is frozen (requires_grad=False)"
    more = f" (and {len(trained) - SHOWN} earlier ones)" if len(trained) > SHOWN else ""
    return f"pass head= one of: {', '.join(trained[-SHOWN:])}{more}"


def _named(model: nn.Module, name: str) -> nn.Module:
    """A submodule by its dotted name, with or without the names that wrappers add to it."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return modules[name]
    for full, module in modules.items():
        if _bare(full) == _bare(name):
            return module
    raise ValueError(f"the model has no module named {name!r}; {candidates(model)}")


def _bare(name: str) -> str:
    """A dotted name without DDP's, torch.compile's, Fabric's and PEFT's parts."""
    name = re.sub(r"\.modules_to_save\.[^.]+", "", name)
    wrappers = ("module.", "_orig_mod.", "_forward_module.", "base_model.model.", "base_model.")
    while name.startswith(wrappers):
        name = next(name[len(each) :] for each in wrappers if name.startswith(each))
    return name


def trained_copy(module: nn.Module) -> nn.Module:
    """The copy that PEFT trains of a module in its `modules_to_save`; any other module itself."""
    own = dict(module.named_children())
    original, copies = own.get("original_module"), own.get("modules_to_save")
    if original is None or not isinstance(copies, nn.ModuleDict):
        return module
    active = [name for name in getattr(module, "active_adapters", ()) if name in copies]
    return copies[active[0]] if active else original


def ends_of(module: nn.Module) -> list[nn.Module]:
    """The linear layers and convolutions that may make a module's output; none if unknown."""
    module = trained_copy(module)
    if is_linear(module) or isinstance(module, CONVOLUTIONS):
        return [module]
    declared = _declared(module)
    if declared is not None:
        return declared
    named = children_of(module)
    children = list(named.values())
    if len(children) <= 1 or isinstance(module, nn.Sequential):
        return ends_of(children[-1]) if children else []
    if isinstance(module, nn.ModuleDict):
        return _all_ends(children)
    if isinstance(module, nn.ModuleList):
        chain = all(entry(after) == (nn.Linear, width(each)) for each, after in pairwise(children))
        return _last(children) if chain else _all_ends(children)
    usual = [child for name, child in named.items() if name in HEAD_NAMES and entry(child)]
    usual = [child for child in usual if not _leads_on(child, usual, children)]
    if len(usual) > 1:
        return _all_ends(usual)
    if usual:
        return _with_rivals(usual[0], ends_of(usual[0]), children, certain=True)
    scaled = any(name in SCALE_NAMES for name, _ in module.named_parameters(recurse=False))
    if scaled or getattr(module, "base_model", None) is module:  # Transformers: without a head
        return []
    ends = _with_rivals(children[-1], _last(children), children, certain=False)
    tied = [m for m in module.modules() if isinstance(m, nn.Embedding)] if len(ends) == 1 else []
    return ends + [each for each in tied if each.embedding_dim == width(ends[0])]


def _all_ends(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The ends of several outputs; none if one of them is unknown, so that no other is taken."""
    each = [ends_of(module) for module in modules]
    return [end for ends in each for end in ends] if all(each) else []


def _last(children: list[nn.Module]) -> list[nn.Module]:
    """The ends of the last child, if it is of a kind that makes outputs."""
    last = trained_copy(children[-1])
    ends = ends_of(last)
    certain = isinstance(last, nn.Linear | nn.Sequential) or _declared(last) is not None
    if certain or all(isinstance(end, CONVOLUTIONS) for end in ends):
        return ends
    return ends if plain(last) and not keeps_width(last) else []


def _declared(module: nn.Module) -> list[nn.Module] | None:
    """The ends that a PEFT, timm or Transformers model names itself; None if it names none."""
    base = _ask(module, "get_base_model")
    if isinstance(base, nn.Module) and base is not module:
        return ends_of(base)
    classifier = _ask(module, "get_classifier")
    several = classifier if isinstance(classifier, list | tuple) else [classifier]
    if several and all(isinstance(each, nn.Module) and each is not module for each in several):
        return _all_ends(several)
    output = _ask(module, "get_output_embeddings")
    if isinstance(output, nn.ModuleList):
        return _all_ends(output)
    output = trained_copy(output) if isinstance(output, nn.Module) else None
    return _with_second_heads(output, module) if is_linear(output) else None


def _ask(module: nn.Module, method: str) -> Any:
    """What a method of the model returns; None without it, or if it wants to know more."""
    found = getattr(module, method, None)
    try:
        return found() if callable(found) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _with_second_heads(head: nn.Linear, module: nn.Module) -> list[nn.Module]:
    """A head, and the rivals at each level from a module down to it."""
    ends: list[nn.Module] = [head]
    while module is not head:
        children = list(children_of(module).values())
        holders = [child for child in children if any(each is head for each in child.modules())]
        if not holders:
            break
        ends += _with_rivals(holders[0], [head], children, certain=True)[1:]
        module = trained_copy(holders[0])
    return ends


def _with_rivals(
    chosen: nn.Module, ends: list[nn.Module], children: list[nn.Module], *, certain: bool
) -> list[nn.Module]:
    """The one end of a child, and those of children that may make an output beside it."""
    if len(ends) != 1:
        return ends
    (head,) = ends
    outputs, rivals = width(head), []
    if isinstance(head, CONVOLUTIONS):
        return [] if any(entry(child) == (nn.Linear, outputs) for child in children) else ends
    square = head is chosen and keeps_width(head) and not certain
    for place, child in enumerate(children):
        after = place > children.index(chosen)
        block = not isinstance(child, (nn.Linear, nn.Sequential, *CONVOLUTIONS))
        if child is chosen or (certain and block and not after):
            continue  # a block before a head of a usual name: a router, a pooling by attention
        if not may_end(child) and (certain or not _declared(child)):
            continue
        later = [chosen, *children[place + 1 :]]
        twin = square and is_linear(child) and width(child) == outputs  # as CLIP's projections
        if not twin and any(entry(each) == (nn.Linear, width(child)) for each in later):
            continue
        same_input = entry(child) in (entry(chosen), (nn.Linear, outputs))
        for end in ends_of(child):
            taken = any(takes(each, end) for each in later)
            if isinstance(end, CONVOLUTIONS):
                beside = after or keeps_width(chosen)
            else:
                passed_on = any(not may_end(each) for each in later[1:])
                beside = same_input or (width(end) == outputs and not passed_on)
            if twin or (beside and not taken):
                rivals.append(end)
    return ends + rivals


def _leads_on(child: nn.Module, usual: list[nn.Module], children: list[nn.Module]) -> bool:
    """Whether a later child takes the output: `head` before `classifier`, as in ModernBERT."""
    place = children.index(child)
    ends = ends_of(child)
    convolution = bool(ends) and isinstance(ends[0], CONVOLUTIONS)
    later = [each for each in children[place + 1 :] if convolution or each in usual]
    return any(entry(each) == (nn.Linear, width(child)) for each in later)
