"""Which layer is the head: the linear layer that makes a model's output, if that is certain."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.hooks.private import never_called
from primum.kernel.head import registered

# Where the common families keep the layer that makes their output: torchvision, Transformers.
HEAD_NAMES = (
    *("fc", "classifier", "head", "heads"),
    *("classification_head", "score", "qa_outputs", "lm_head"),
)
SCALE_NAMES = ("logit_scale", "temperature")  # Of similarities, as in CLIP and ALIGN.
FEATURES, CHANNELS = ("in_features", "out_features"), ("in_channels", "out_channels")
# Parts of dotted names: of DistributedDataParallel, torch.compile, Fabric and PEFT.
WRAPPERS = re.compile(
    r"^((module|_orig_mod|_forward_module|base_model\.model|base_model)\.)+|\.modules_to_save\.[^.]+"
)
SHOWN = 3  # Candidates in a message.


def find_head(model: nn.Module, optimizers: Collection[Optimizer] = ()) -> nn.Linear:
    """The linear layer that makes the output, or an error that lists the candidates.

    Down from the model, in this order: what it declares itself (PEFT, timm's `get_classifier`,
    Transformers' `get_output_embeddings`); the only child, as in a wrapper (torch.compile,
    DistributedDataParallel, a LightningModule); the last child of a Sequential; the last child
    under a usual name; the last child, if it is a linear layer, a Sequential, or a block of linear
    and norm layers. Nothing is run: whether the layer makes the output shows in the first pass.

    Refused are models that compare embeddings (CLIP), Transformers' models without a head, and a
    layer that is not trained, by any of `optimizers` if given, beside some that are.
    """
    head, listed = _end(model), candidates(model, optimizers)
    if head is None:
        raise ValueError(f"cannot tell which layer is the head; {listed}")
    if not _trained(head, optimizers) and listed.startswith("pass head="):
        raise ValueError(
            "the layer that seems to be the head is frozen (with PEFT: list it in modules_to_save) "
            f"or the optimizer does not hold it; pass the optimizer that trains it, or {listed}"
        )
    return head


def given_head(model: nn.Module, head: nn.Module | str) -> nn.Linear:
    """The head that a user names or passes; of a layer that PEFT trains a copy of, the copy."""
    found: object = _named(model, head) if isinstance(head, str) else head
    found = _trained_copy(found) if isinstance(found, nn.Module) else found
    if not is_linear(found):
        raise TypeError(f"head must be an nn.Linear, got {kind_of(found)}; {candidates(model)}")
    return found


def candidates(
    model: nn.Module, optimizers: Collection[Optimizer] = (), *, but: object = None
) -> str:
    """What a user may pass as `head`, for messages: trained linear layers, the likely one first."""
    linears = {name: each for name, each in model.named_modules() if is_linear(each)}
    if not linears:
        return "the model has no nn.Linear, and primum needs one"
    kept = [
        name
        for name, each in linears.items()
        if each is not but and _trained(each, optimizers) and "lora_" not in name
    ]
    if not kept:
        other = "" if but is None else "other "
        return f"no {other}nn.Linear is trained (with PEFT: list the head in modules_to_save)"
    kept.sort(key=lambda name: any(part in HEAD_NAMES for part in name.split(".")))
    texts = [f"{name} ({_widths(linears[name])})" if name else "the model itself" for name in kept]
    more = f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else ""
    return f"pass head= one of: {', '.join(texts[: -SHOWN - 1 : -1])}{more}"


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a linear layer gets called, or what behaves as one (as PyG's `Linear`).

    `nn.MultiheadAttention` has one that is not called.
    """
    if isinstance(module, nn.Linear) or not isinstance(module, nn.Module):
        return isinstance(module, nn.Linear) and not never_called(module)
    weight: Any = registered(module, "weight")
    for names in (FEATURES, CHANNELS):
        shape = tuple(getattr(module, name, None) for name in names)
        if weight is not None and weight.dim() == 2 and weight.shape[::-1] == shape:
            return is_affine(module) is True
    return False


def is_affine(layer: nn.Module) -> bool | None:
    """Whether a layer computes weight @ input + bias; None if it wants other inputs than rows."""
    if type(layer).forward is nn.Linear.forward:
        return True
    weight: Any = layer.weight
    with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        row = torch.linspace(-1, 1, weight.shape[1]).to(weight)
        for rows in (row.unsqueeze(0), torch.stack((row, -row)).unsqueeze(0)):
            try:
                found: Any = type(layer).forward(layer, rows)
                expected = nn.functional.linear(rows, weight, getattr(layer, "bias", None))
            except Exception:
                continue  # it wants a sequence, or other arguments: then not to be judged here
            if not isinstance(found, Tensor):
                return None
            same = found.shape == expected.shape
            return same and torch.allclose(found.to(expected), expected, 0.05, 0.05)  # SYNC: once
    return None


def kind_of(thing: object) -> str:
    """Module path and name of a class, for messages: many are called SGD or Linear."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _widths(layer: Any) -> str:
    pair = CHANNELS if hasattr(layer, "in_channels") else FEATURES
    return " -> ".join(str(getattr(layer, each)) for each in pair)


def _trained(layer: nn.Module, optimizers: Collection[Optimizer] = ()) -> bool:
    """Whether a step moves the layer's weight, of one of these optimizers if there are any."""
    weight: Any = layer.weight
    held = (p for each in optimizers for group in each.param_groups for p in group["params"])
    return weight.requires_grad and (not optimizers or any(each is weight for each in held))


def _named(model: nn.Module, name: str) -> nn.Module:
    """A submodule by its dotted name, with or without the names that wrappers add to it."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    bare = {WRAPPERS.sub("", full): full for full in reversed(modules)}
    full = name if name in modules else bare.get(WRAPPERS.sub("", name))
    if full is None:
        raise ValueError(f"the model has no module named {name!r}; {candidates(model)}")
    return modules[full]


def _trained_copy(module: nn.Module) -> nn.Module:
    """The copy that PEFT trains of a module in its `modules_to_save`; any other module itself."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    active = [name for name in getattr(module, "active_adapters", ()) if name in copies]
    return copies[active[0]] if active else getattr(module, "original_module", module)


def _end(module: nn.Module) -> nn.Linear | None:
    """The linear layer that seems to make a module's output; None if that is not certain."""
    module = _trained_copy(module)
    if is_linear(module):
        return module
    if hasattr(module, "base_layer"):  # PEFT's, around a frozen layer
        return None
    declared = _declared(module)
    if declared:
        return _end(declared[0]) if len(declared) == 1 else None
    named = {name: each for name, each in module.named_children() if not _only_embeds(each)}
    children = list(named.values())
    if len(children) <= 1 or isinstance(module, nn.Sequential):
        return _end(children[-1]) if children else None
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # several heads, unless a chain
        chain = all(
            is_linear(one) and is_linear(after) and after.in_features == one.out_features
            for one, after in pairwise(children)
        )
        return _end(children[-1]) if chain and isinstance(module, nn.ModuleList) else None
    usual = [_end(each) for name, each in named.items() if name in HEAD_NAMES]
    found = [each for each in usual if each is not None]
    if found:
        return found[-1]
    scaled = any(name in SCALE_NAMES for name, _ in module.named_parameters(recurse=False))
    if scaled or getattr(module, "base_model", None) is module:  # Transformers: without a head
        return None
    last = _trained_copy(children[-1])
    plain = isinstance(last, nn.Sequential) or _declared(last) or _only_linears(last)
    return _end(last) if plain else None


def _declared(module: nn.Module) -> list[nn.Module]:
    """The heads that a PEFT, timm or Transformers model names itself."""
    for method in ("get_base_model", "get_classifier", "get_output_embeddings"):
        function = getattr(module, method, None)
        try:
            found = function() if callable(function) else None
        except (AttributeError, NotImplementedError, TypeError):
            continue  # it wants to know more
        several: Any = found if isinstance(found, list | tuple | nn.ModuleList) else [found]
        if several and all(isinstance(each, nn.Module) and each is not module for each in several):
            return list(several)
    return []


def _only_embeds(module: nn.Module) -> bool:
    """Whether a module has no parameters but those of embeddings."""
    tables = nn.Embedding | nn.EmbeddingBag
    own = (each for each in module.modules() if not isinstance(each, tables))
    return not any(True for each in own for _ in each.parameters(recurse=False))


def _only_linears(module: nn.Module) -> bool:
    """Whether linear layers and norms are all that has parameters."""
    return all(
        is_linear(each) or all(p.dim() <= 1 for p in each.parameters(recurse=False))
        for each in module.modules()
    )
