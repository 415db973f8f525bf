"""Which layer is the head: the last linear layer of a model, where there is no doubt about it."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from primum.compat import never_called

# Where the common families keep the layer that makes their output: torchvision, Transformers.
HEAD_NAMES = ("fc", "classifier", "classification_head", "head", "heads", "score", "lm_head")


def find_head(model: nn.Module) -> nn.Linear:
    """The last linear layer, or an error that lists the candidates.

    Down from the model, in this order: what it says itself (timm's `get_classifier`); the child
    under a usual name, if it is the only one; the only child, as in a wrapper (torch.compile,
    DistributedDataParallel, a LightningModule); the last child of a Sequential; the last of a plain
    module, if it is a linear layer or a Sequential. A child beside it that takes the same input and
    whose output no later one takes is a second head: then nobody can know.
    """
    head = _end_of(model)
    if head is None:
        raise ValueError(f"cannot tell which layer is the head; {candidates(model)}")
    return head


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a linear layer gets called; `nn.MultiheadAttention` has one that does not."""
    return isinstance(module, nn.Linear) and not never_called(module)


def candidates(model: nn.Module) -> str:
    """What a user may pass as `head`, for error messages."""
    linears = [
        f"{name} ({m.in_features} -> {m.out_features})" if name else "the model itself"
        for name, m in model.named_modules()
        if is_linear(m)
    ]
    if not linears:
        return "the model has no nn.Linear, and primum works on the last one"
    shown = ", ".join(linears[-12:])
    more = f" (and {len(linears) - 12} before them)" if len(linears) > 12 else ""
    return f"pass head= one of: {shown}{more}"


def _end_of(module: nn.Module) -> nn.Linear | None:
    """The linear layer that makes a module's output, or None if it may be another one."""
    if is_linear(module):
        return module
    told = _told(module)
    if told is not None:
        return _end_of(told)
    children = {n: m for n, m in module.named_children() if any(True for _ in m.parameters())}
    if not children:
        return None
    last = list(children.values())[-1]
    if len(children) == 1 or isinstance(module, nn.Sequential):
        return _end_of(last)
    if isinstance(module, nn.ModuleDict):
        return None
    named = [m for n, m in children.items() if n in HEAD_NAMES and _has_linear(m)]
    if len(named) > 1:
        return None
    if not named and not isinstance(last, nn.Linear | nn.Sequential):
        return None
    chosen = named[0] if named else last
    return None if _rivals(chosen, list(children.values())) else _end_of(chosen)


def _told(module: nn.Module) -> nn.Module | None:
    """What timm's `get_classifier` says, if it names one module with something in it."""
    get_classifier = getattr(module, "get_classifier", None)
    told = get_classifier() if callable(get_classifier) else None
    return told if isinstance(told, nn.Module) and _has_linear(told) else None


def _has_linear(module: nn.Module) -> bool:
    return any(is_linear(m) for m in module.modules())


def _rivals(chosen: nn.Module, children: list[nn.Module]) -> list[nn.Module]:
    """Children that may make an output beside `chosen`: fed like it or by it, and feeding none."""
    head = _end_of(chosen)
    if head is None:
        return []
    inlets = {_entry(chosen), (nn.Linear, head.out_features)}
    rivals = []
    for place, child in enumerate(children):
        end = _end_of(child) if isinstance(child, nn.Linear | nn.Sequential) else None
        if child is chosen or end is None or _entry(child) not in inlets:
            continue
        takers = [_entry(other) for other in (chosen, *children[place + 1 :])]
        if (nn.Linear, end.out_features) not in takers:
            rivals.append(child)
    return rivals


def _entry(module: nn.Module) -> tuple[type, int] | None:
    """What the first layer of a module takes: its kind and its number of inputs."""
    for layer in module.modules():
        inputs = getattr(layer, "in_features", getattr(layer, "in_channels", None))
        if isinstance(inputs, int):
            return (nn.Linear if isinstance(layer, nn.Linear) else type(layer)), inputs
    return None
