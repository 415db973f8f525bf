"""What a module takes and what it gives, read off its layers; nothing is run."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def takes(module: nn.Module, end: nn.Module) -> bool:
    """Whether a module may take the output of a layer, by the numbers of features."""
    given, taken = width(end), entry(module)
    if not isinstance(end, CONVOLUTIONS):
        return taken == (nn.Linear, given)
    if not may_end(module) or taken is None or given is None:
        return True
    kind, inputs = taken
    flattened = kind is nn.Linear and not keeps_width(module) and inputs % given == 0
    return flattened or inputs == given


def may_end(module: nn.Module) -> bool:
    """Whether a child is one of a few layers, and not a network of its own."""
    return isinstance(module, (nn.Sequential, *CONVOLUTIONS)) or plain(module)


def plain(module: nn.Module) -> bool:
    """Whether linear layers and norms are all that has parameters."""
    return all(
        isinstance(layer, nn.Linear) or all(p.dim() <= 1 for p in layer.parameters(recurse=False))
        for layer in module.modules()
    )


def keeps_width(module: nn.Module) -> bool:
    """Whether linear layers give as many features as they take, as a pooler or a gate does."""
    return entry(module) == (nn.Linear, width(module))


def entry(module: nn.Module) -> tuple[type, int] | None:
    """What the first layer of a module takes: its kind and its number of inputs."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return nn.Linear, layer.in_features
        if isinstance(layer, CONVOLUTIONS):
            return type(layer), layer.in_channels
    return None


def width(module: nn.Module) -> int | None:
    """How many features the last layer of a module gives; a norm has a weight for each."""
    for layer in reversed(list(module.modules())):
        if isinstance(layer, nn.Linear):
            return layer.out_features
        if isinstance(layer, CONVOLUTIONS):
            return layer.out_channels
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 1:
            return len(weight)
    return None


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children that may make an output: with parameters, and not of embeddings alone."""
    return {
        name: child
        for name, child in module.named_children()
        if any(
            not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
            and any(True for _ in layer.parameters(recurse=False))
            for layer in child.modules()
        )
    }
